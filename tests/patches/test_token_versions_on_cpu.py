# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's clients of rollout servers say which weights sampled each token, over aborts and turns of an agent loop."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput

from jetrl_verl.patches.token_versions import PATCHES, TOKEN_VERSIONS


class Servers:
    """Answers of servers in turn: (number of tokens, version, whether a weight sync aborted it)."""

    def __init__(self, client, *answers: tuple[int, int, bool]) -> None:
        self.answers, self.asked = list(answers), []
        client._acquire_server = self.acquire
        client._release_server = lambda *args, **kwargs: None
        self.generate = SimpleNamespace(remote=self.answer)

    async def acquire(self, request_id, **extra):
        return "server", self

    async def answer(self, prompt_ids, **kwargs) -> TokenOutput:
        count, version, aborted = self.answers.pop(0)
        return TokenOutput(
            token_ids=list(range(count)),
            log_probs=[0.0] * count,
            stop_reason="aborted" if aborted else "completed",
            extra_fields={"global_steps": version},
        )


@pytest.fixture
def turns(monkeypatch):
    """The ``extra_fields`` of each turn of an agent loop; ``turns(client's name, prompts' lengths, answers)``."""
    for patch in PATCHES:
        patch.apply()
    pause = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pause(0))

    def run(name: str, prompts: list[int], *answers: tuple[int, int, bool]) -> list[dict]:
        rollout = SimpleNamespace(name="vllm", response_length=100, full_determinism=False)
        client = getattr(llm_server, name)(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
        servers = Servers(client, *answers)

        async def agent_loop():
            return [
                await client.generate(request_id="1", prompt_ids=[0] * length, sampling_params={}) for length in prompts
            ]

        async def two_loops():
            # Each loop is a task of its own, as verl starts them.
            first = await asyncio.create_task(agent_loop())
            assert not servers.answers
            servers.answers = list(answers)
            assert [output.extra_fields for output in await asyncio.create_task(agent_loop())] == [
                output.extra_fields for output in first
            ]
            return first

        return [output.extra_fields for output in asyncio.run(two_loops())]

    return run


def test_a_request_that_syncs_abort_has_a_version_for_each_token(turns):
    (fields,) = turns("FullyAsyncLLMServerClient", [5], (3, 7, True), (0, 7, True), (4, 8, False))
    assert fields[TOKEN_VERSIONS] == [[5, 3, 7], [8, 4, 8]]
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (7, 8)


@pytest.mark.parametrize("client", ["LLMServerClient", "FullyAsyncLLMServerClient"])
def test_later_turns_are_added_to_the_first_ones_fields(turns, client):
    """verl's agent loop with tools keeps the fields of its first turn."""
    first, _ = turns(client, [5, 20], (3, 7, False), (2, 8, False))
    assert first[TOKEN_VERSIONS] == [[5, 3, 7], [20, 2, 8]]
