# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Each token of a rollout knows the version of the weights that sampled it.

verl 0.9.1's trainers other than ``sync`` abort requests at a weight sync and resume them with the new weights. A
sequence then states the versions of its first and its last token, and nothing says where one ends. The client of the
servers now counts: under :data:`TOKEN_VERSIONS` a sequence's ``extra_fields`` list, for each answer of a server, its
first position in prompt and response together, how many tokens it has, and the version.
"""

from contextvars import ContextVar
from typing import Any

from jetrl_verl.patches.patch import Patch

TOKEN_VERSIONS = "token_versions"

_ANSWERS: ContextVar[list[list[Any]] | None] = ContextVar("jetrl_answers", default=None)
"""Answers to this agent loop so far, over all of its turns."""


async def generate(stock, self: Any, *args: Any, prompt_ids: list[int], **kwargs: Any) -> Any:
    output = await stock(self, *args, prompt_ids=prompt_ids, **kwargs)
    answers = _ANSWERS.get()
    if answers is None:
        _ANSWERS.set(answers := [])
    if output.token_ids:
        answers.append([len(prompt_ids), len(output.token_ids), output.extra_fields.get("global_steps")])
    output.extra_fields[TOKEN_VERSIONS] = answers
    return output


async def generate_and_resume(stock, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = await stock(self, *args, **kwargs)
    # Made anew from the answers, which `generate` has counted. Filled by later turns, whose fields are not kept.
    output.extra_fields[TOKEN_VERSIONS] = _ANSWERS.get()
    return output


_WHY = dict(
    symptom="nothing says which tokens of a resumed rollout the current weights sampled, so none of them is compared",
    upstream="a sequence has min_global_steps and max_global_steps; no issue is known",
    until="verl keeps the version of each token",
    needed=False,
)

COUNTED = Patch(
    replaces="verl.workers.rollout.llm_server:LLMServerClient.generate",
    sha256={"0.9.1": "2d8b5f0bd88a62c135e0138b7d46ea573eba74b7aeebd64836c42dabed7715f4"},
    by=generate,
    **_WHY,
)
KEPT = Patch(
    replaces="verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate",
    sha256={"0.9.1": "c7a0532f3c8a3de0a056417e0ffcaf3ceb2282dcdd6e00cca87cde41abe98a54"},
    by=generate_and_resume,
    **_WHY,
)
PATCHES = (COUNTED, KEPT)
