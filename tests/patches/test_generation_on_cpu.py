# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The patched rollout server gives stock verl's answers from two outputs a request, however a request ends.

verl's server and vLLM's ``AsyncLLM`` run over a scripted engine core (``scripted_server.py``)."""

import ast
import asyncio
import inspect
import pickle

import numpy as np
import pytest
from patch_home import current, home
from scripted_server import ScriptedCore, functions_of, log_probs_of, scripted_server, stock_in_place, tokenizer_of

from jetrl_verl.patches.generation import OUTPUTS, REQUESTS
from jetrl_verl.plugin import PATCHED_FOR_EVERY_PRECISION

TEXT = "The rollout says what it has sampled, and the trainer asks how likely that was. Caf\u00e9 \u4f60\u597d. " * 40
BOTH = pytest.mark.parametrize("row", ["stock", "patched"])


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(TEXT, 400)


@pytest.fixture(scope="module")
def script(tokenizer) -> np.ndarray:
    return np.array(tokenizer(TEXT)["input_ids"])


@pytest.fixture
def run(cpu_platform, tokenizer, script):
    """``run(row, scene, **options of the core)``: what ``scene(server, core)`` returns, ``stock`` or ``patched``."""

    def run(row: str, scene, **options):
        async def play():
            core = ScriptedCore(script, **options)
            server = scripted_server(core, tokenizer)
            try:
                return await asyncio.wait_for(scene(server, core), 30)
            finally:
                if server.engine.output_handler is not None:
                    server.engine.output_handler.cancel()

        with functions_of(row):
            return asyncio.run(play())

    return run


def call(server, place: int = 0, request_id: str = "request", **sampling):
    """A request whose response begins at this place of the script."""
    given = {"temperature": 1.0, "logprobs": True, "max_tokens": 12} | sampling
    return server.generate(prompt_ids=[1, 2, 3], sampling_params=given, request_id=f"{request_id}-{place}")


def outputs_made(monkeypatch) -> list:
    from vllm.v1.engine import output_processor

    made = []
    make = output_processor.RequestState._new_request_output

    def counted(self, *args, **kwargs):
        made.append(self.request_id)
        return make(self, *args, **kwargs)

    monkeypatch.setattr(output_processor.RequestState, "_new_request_output", counted)
    return made


async def begun(server, core, requests: int, steps: int) -> None:
    """Wait until ``requests`` requests have ``steps`` tokens each, and their callers have their first output."""
    states = server.engine.output_processor.request_states
    while len(core.requests) < requests or any(s.detokenizer.num_output_tokens() < steps for s in states.values()):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)


REQUESTS_OF = {
    "length": {},
    "one token": {"max_tokens": 1},
    "no log-probabilities": {"logprobs": False},
    "with text": {"detokenize": True},
    "stop token": {"stop_token_ids": "of the script", "max_tokens": 100},
    "stop string": {"stop": ["sampled"], "max_tokens": 100},
    "stop string of several": {
        "stop": ["never in it", "trainer"],
        "include_stop_str_in_output": True,
        "max_tokens": 99,
    },
    "the last output alone": {"output_kind": "FINAL_ONLY"},
    "several responses": {"n": 2},
}


@pytest.mark.parametrize("what", REQUESTS_OF)
def test_an_answer_equals_the_stock_answer(run, script, what):
    def answers(row):
        async def scene(server, core):
            from vllm.sampling_params import RequestOutputKind

            sampling = dict(REQUESTS_OF[what])
            if "stop_token_ids" in sampling:
                sampling["stop_token_ids"] = [int(script[25])]
            if "output_kind" in sampling:
                sampling["output_kind"] = RequestOutputKind[sampling["output_kind"]]
            outputs = await asyncio.gather(*(call(server, place, **sampling) for place in (0, 5, 400)))
            return [output.model_dump() for output in outputs], sorted(core.aborted), server._admitting

        return run(row, scene)

    stock, patched = answers("stock"), answers("patched")
    assert [len(answer["token_ids"]) for answer in stock[0]][0] > 0
    assert patched[0] == stock[0]
    assert len(patched[1]) == len(stock[1]) and patched[2] == stock[2] == 0
    for answer in stock[0]:
        if answer["log_probs"] is not None:
            assert len(answer["log_probs"]) == len(answer["token_ids"]) and all(map(np.isfinite, answer["log_probs"]))


def test_data_of_single_tokens_is_in_the_answer(run):
    """Experts of each token, log-probabilities and cached tokens of the prompt, parameters of a KV transfer."""

    def more(done):
        import torch
        from vllm.v1.metrics.stats import PrefillStats
        from vllm.v1.outputs import LogprobsTensors

        fields = {"routed_experts": np.full((1 if done else 3, 2, 2), done, dtype=np.int16)}
        if done == 0:
            tokens, ranks = torch.tensor([[2, 8], [3, 9]]), torch.tensor([2, 1])
            fields["new_prompt_logprobs_tensors"] = LogprobsTensors(tokens, -tokens.float() / 7, ranks)
            fields["prefill_stats"] = PrefillStats(num_prompt_tokens=3, num_cached_tokens=2)
        return fields | ({"kv_transfer_params": {"blocks": [4]}} if done == 11 else {})

    def answer(row):
        async def scene(server, core):
            server.config.enable_rollout_routing_replay = True
            return (await call(server, 3, prompt_logprobs=1)).model_dump()

        return run(row, scene, more=more)

    stock, patched = answer("stock"), answer("patched")
    experts = patched.pop("routed_experts")
    assert np.array_equal(experts, stock.pop("routed_experts")) and experts.shape == (14, 2, 2)
    assert patched == stock
    fields = patched["extra_fields"]
    assert fields["num_cached_tokens"] == 2 and fields["kv_transfer_params"] == {"blocks": [4]}
    assert len(fields["prompt_logprobs"]) == 3 and fields["prompt_ids"][0] == [8]


@pytest.mark.parametrize(("row", "outputs"), [("stock", 24), ("patched", 4)])
def test_a_request_has_two_outputs(run, monkeypatch, row, outputs):
    made = outputs_made(monkeypatch)

    async def scene(server, core):
        return await asyncio.gather(call(server, 0), call(server, 1))

    run(row, scene)
    assert len(made) == outputs


def test_only_requests_that_need_text_are_detokenized(run):
    async def scene(server, core):
        await asyncio.gather(call(server), call(server, stop=["x"]), call(server, detokenize=True))
        return [request.sampling_params.detokenize for request in core.requests]

    assert run("patched", scene) == [False, True, True]


@pytest.mark.parametrize("ids", [("a", "b"), ("a", "a")], ids=["two ids", "one id"])
def test_an_abort_of_all_returns_partial_answers_at_once(run, script, ids):
    """As before a weight sync; under ``full_determinism`` ids repeat."""

    def aborted(row):
        async def scene(server, core):
            calls = [asyncio.create_task(call(server, 3, name, max_tokens=500)) for name in ids]
            core.allow(5)
            await begun(server, core, 2, 5)
            count = (await asyncio.wait_for(server.abort_all_requests(), 5))["aborted_count"]
            late = asyncio.create_task(call(server, 9, "late", max_tokens=2))
            answers = [answer.model_dump() for answer in await asyncio.gather(*calls)]
            assert not late.done(), "the gate is closed"
            await server.resume_generation()
            core.allow(2)
            return answers, count, (await late).model_dump()

        return run(row, scene, steps_wait=True)

    stock, patched = aborted("stock"), aborted("patched")
    assert patched == stock
    answers, count, late = patched
    assert count == 2 and late["stop_reason"] == "completed"
    for answer in answers:
        assert answer["stop_reason"] == "aborted"
        assert answer["token_ids"] == script[3:8].tolist()
        assert answer["log_probs"] == log_probs_of(np.arange(3, 8)).astype(float).tolist()


def test_an_abort_waits_for_the_first_token_of_admitted_requests(run, script):
    """As in stock verl, which would resend a request with an empty answer for ever."""

    async def scene(server, core):
        waiting = asyncio.create_task(call(server, 3, max_tokens=500))
        await begun(server, core, 1, 0)
        aborted = asyncio.create_task(server.abort_all_requests())
        await asyncio.sleep(0.1)
        assert not aborted.done() and server._admitting == 1
        core.allow(1)
        await asyncio.wait_for(aborted, 5)
        return (await waiting).token_ids

    assert run("stock", scene, steps_wait=True) == run("patched", scene, steps_wait=True) == [int(script[3])]


@BOTH
def test_a_request_aborted_before_its_first_token_is_empty(run, row):
    async def scene(server, core):
        waiting = asyncio.create_task(call(server, max_tokens=500))
        await begun(server, core, 1, 0)
        await server.engine.abort(core.requests[0].request_id, internal=True)
        return (await waiting).model_dump()

    answer = run(row, scene, steps_wait=True)
    assert answer["token_ids"] == [] and answer["log_probs"] == [] and answer["stop_reason"] == "aborted"


@BOTH
def test_aborting_one_request_does_not_end_the_other(run, script, row):
    async def scene(server, core):
        calls = [asyncio.create_task(call(server, 3, name, max_tokens=9)) for name in "ab"]
        core.allow(4)
        await begun(server, core, 2, 4)
        await server.abort_request(core.requests[0].request_id)
        core.allow(10)
        return [
            (answer.token_ids, len(answer.log_probs), answer.stop_reason) for answer in await asyncio.gather(*calls)
        ]

    first, second = run(row, scene, steps_wait=True)
    assert first == (script[3:7].tolist(), 4, "aborted")
    assert second == (script[3:12].tolist(), 9, "completed")


@BOTH
def test_a_cancelled_caller_ends_its_request(run, row):
    async def scene(server, core):
        waiting = asyncio.create_task(call(server, max_tokens=500))
        core.allow(4)
        await begun(server, core, 1, 4)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return core.aborted == [core.requests[0].request_id], server._admitting, len(core.running)

    assert run(row, scene, steps_wait=True) == (True, 0, 0)


@BOTH
def test_an_engine_failure_reaches_every_caller(run, row):
    async def scene(server, core):
        waiting = [asyncio.create_task(call(server, place, max_tokens=500)) for place in (0, 1)]
        core.allow(4)
        await begun(server, core, 2, 4)
        server.engine.output_processor.propagate_error(RuntimeError("the core is gone"))
        return await asyncio.gather(*waiting, return_exceptions=True), server._admitting

    errors, admitting = run(row, scene, steps_wait=True)
    assert len(errors) == 2 and all(isinstance(error, Exception) for error in errors) and admitting == 0


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
def test_other_users_of_the_engine_keep_their_stream(run, script, kind):
    """verl's request comes first: the task that handles outputs starts in its context and outlives it."""

    async def scene(server, core):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = asyncio.create_task(call(server, 0, max_tokens=20))
        core.allow(1)
        await begun(server, core, 1, 1)
        params = SamplingParams(max_tokens=6, logprobs=2, output_kind=RequestOutputKind[kind])
        stream, streamed = server.engine.generate({"prompt_token_ids": [1]}, params, "other-3"), []
        asyncio.get_running_loop().call_later(0.05, core.allow, 1)  # the stream begins with its first reader
        async for output in stream:
            streamed.append((len(output.outputs[0].token_ids), output.outputs[0].text, len(output.outputs[0].logprobs)))
            core.allow(1)
        core.allow(20)
        return streamed, (await request).token_ids

    streamed, token_ids = run("patched", scene, steps_wait=True)
    assert token_ids == script[:20].tolist()
    assert [tokens for tokens, *_ in streamed] == ([1] * 6 if kind == "DELTA" else [1, 2, 3, 4, 5, 6])
    assert any(text for _, text, _ in streamed) and all(tokens == logprobs for tokens, _, logprobs in streamed)


def test_vllm_processes_log_probabilities_of_prompts_and_other_tokens(run):
    async def scene(server, core):
        token = home(OUTPUTS).FIRST_AND_LAST.set(True)
        processor = server.engine.output_processor
        kinds = []
        for place, sampling in enumerate(({"logprobs": 0}, {"logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 1}, {})):
            from vllm import SamplingParams
            from vllm.v1.engine.input_processor import InputProcessor

            request = server.engine.input_processor.process_inputs(
                f"kept-{place}", {"prompt_token_ids": [1]}, SamplingParams(**sampling)
            )
            InputProcessor.assign_request_id(request)
            processor.add_request(request, None)
            kinds.append(type(processor.request_states[request.request_id].logprobs_processor).__name__)
        home(OUTPUTS).FIRST_AND_LAST.reset(token)
        return kinds

    assert run("patched", scene) == ["_SampledLogProbs"] + ["LogprobsProcessor"] * 3


def test_the_log_probability_processor_has_every_attribute_that_vllm_reads():
    from vllm.v1.engine import output_processor

    processor = home(OUTPUTS)._SampledLogProbs()
    read = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(output_processor)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("logprobs_processor")
    }
    # Only a DELTA stream, which is not patched, reads pop_prompt_logprobs.
    assert read - {"pop_prompt_logprobs"} == {"logprobs", "prompt_logprobs", "cumulative_logprob", "update_from_output"}
    assert all(hasattr(processor, name) for name in read - {"pop_prompt_logprobs"})


def test_a_token_that_was_not_sampled_has_no_log_probability():
    log_probs = home(OUTPUTS)._SampledLogProbs()
    log_probs.tokens, log_probs.values = [5, 6], [-1.0, -2.0]
    assert len(log_probs) == 2
    assert [position[token].logprob for token, position in zip((5, 6), log_probs, strict=True)] == [-1, -2]
    with pytest.raises(KeyError):
        next(iter(log_probs))[6]


def test_the_plugin_applies_both_patches_under_every_precision():
    assert {patch.module for patch in (OUTPUTS, REQUESTS)} == {*PATCHED_FOR_EVERY_PRECISION["generation"]}
    assert not OUTPUTS.needed and not REQUESTS.needed, "a run without them is only slower"


def test_ray_gets_an_asynchronous_method_with_verls_parameters(cpu_platform):
    REQUESTS.apply()
    generate = current(REQUESTS)
    assert inspect.iscoroutinefunction(generate)
    assert {"prompt_ids", "sampling_params"} <= set(inspect.signature(generate).parameters)


def test_without_the_vllm_patch_the_server_still_answers(run, monkeypatch):
    from vllm.v1.engine import output_processor

    async def scene(server, core):
        monkeypatch.delattr(output_processor, "FIRST_AND_LAST")
        with stock_in_place(OUTPUTS):
            answer = await call(server, 3)
        return answer.stop_reason, core.requests[0].sampling_params.detokenize

    assert run("patched", scene) == ("completed", False)


def test_an_answer_has_no_type_of_the_plugin(run):
    """It is sent to another process."""

    async def scene(server, core):
        return await call(server, 3)

    answer = run("patched", scene)
    assert type(answer.token_ids) is list and type(answer.log_probs) is list
    assert b"jetrl" not in pickle.dumps(answer)
