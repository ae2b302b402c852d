# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Less work per token in verl's rollout server; the answers stay the same.

verl 0.9.1's server reads tokens and log-probabilities of the complete response only. vLLM does more for each token: it
makes an output of everything so far and wakes the request's task, which drops it; it converts the token to text, twice;
and it keeps the log-probability as an object in a dictionary, which Python's garbage collector visits. One thread does
this for all requests, so with many of them it takes longer than the GPU's step. For requests of that server:

* vLLM makes the first and the last output only. The first one is needed: until it arrives the server counts the
  request as being admitted, and a weight sync waits for such requests.
* No text is made, unless the request has stop strings.
* Log-probabilities are numbers in a list, unless the request asks for those of other tokens too.

The last output has all tokens, whatever ended the request: length, stop, abort, pause. The server marks its requests
by setting :data:`FIRST_AND_LAST` in the context in which vLLM adds them. A request id would not do: two requests may
share one under ``full_determinism``. Other users of the engine, such as vLLM's HTTP server, are not affected.
"""

import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from jetrl_verl.patches.patch import Patch

REACHES = (
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.engine",
    "vllm.v1.engine.async_llm:AsyncLLM.add_request",
    "vllm.v1.engine.async_llm:AsyncLLM.output_processor",
    "vllm.v1.engine.logprobs:LogprobsProcessor.update_from_output",
    "vllm.v1.engine.output_processor:RequestState.logprobs_processor",
    "vllm.v1.engine.output_processor:RequestState.make_request_output",
    "vllm.v1.engine.output_processor:RequestState.output_kind",
)
"""Public names that this file relies on; scripts/reach.py watches them."""

FIRST_AND_LAST: ContextVar[bool] = ContextVar("jetrl_first_and_last", default=False)
"""Whether only the first and the last output of a request added now are read."""


def add_request(stock, self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    known = request.request_id in self.request_states  # more input for a request that streams it
    stock(self, request, *args, **kwargs)
    if known or not FIRST_AND_LAST.get():
        return
    state = self.request_states[request.request_id]
    # With several responses to one request every output is needed to tell them apart.
    if state.parent_req is None and state.output_kind.name == "CUMULATIVE":
        _make_first_and_last(state)
        processor = state.logprobs_processor
        if processor.num_logprobs == 0 and processor.num_prompt_logprobs is None:
            state.logprobs_processor = _SampledLogProbs()


def _make_first_and_last(state: Any) -> None:
    """Skip a request's outputs between the first and the last: after the first it asks for the final one only."""
    make = state.make_request_output

    def make_first(*args: Any, **kwargs: Any) -> Any:
        output = make(*args, **kwargs)
        if output is not None:
            del state.make_request_output  # back to the method of the class
            state.output_kind = type(state.output_kind).FINAL_ONLY
        return output

    state.make_request_output = make_first


class _SampledLogProb:
    """The log-probability of one token: a dictionary with the token as its only key, and the value in it."""

    __slots__ = ("logprob", "token")

    def __getitem__(self, token: int) -> "_SampledLogProb":
        if token != self.token:
            raise KeyError(token)
        return self


class _SampledLogProbs:
    """Replaces vLLM's ``LogprobsProcessor``: the log-probability of the sampled token of each position.

    It is the answer's ``logprobs``. Iterating yields objects that support verl's ``position[token].logprob``. The
    garbage collector does not visit lists of numbers.
    """

    num_logprobs, num_prompt_logprobs, prompt_logprobs = 0, None, None

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.values: list[float] = []
        self.cumulative_logprob = 0.0

    @property
    def logprobs(self) -> "_SampledLogProbs":
        return self

    def update_from_output(self, output: Any) -> None:
        new = output.new_logprobs
        if new is None:
            return
        # Column 0 is the sampled token; other columns exist if another request of the batch asked for them.
        self.tokens += new.logprob_token_ids[:, 0].tolist()
        values = new.logprobs[:, 0].tolist()
        self.values += values
        for value in values:
            self.cumulative_logprob += value

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[_SampledLogProb]:
        """One object, reused for every position."""
        position = _SampledLogProb()
        for position.token, position.logprob in zip(self.tokens, self.values, strict=True):
            yield position


async def generate(stock, self: Any, prompt_ids: Any, sampling_params: dict, *args: Any, **kwargs: Any) -> Any:
    if not sampling_params.get("stop"):
        sampling_params = {"detokenize": False} | sampling_params
    # Absent if the patch of vLLM's function was not applied.
    announced = getattr(inspect.getmodule(type(self.engine.output_processor)), "FIRST_AND_LAST", None)
    if announced is None:
        return await stock(self, prompt_ids, sampling_params, *args, **kwargs)
    before = announced.set(True)
    try:
        return await stock(self, prompt_ids, sampling_params, *args, **kwargs)
    finally:
        announced.reset(before)


_WHY = dict(
    symptom="the rollout server makes an output, text and two objects of each token, and the GPU may wait for it",
    upstream="the server iterates over vLLM's stream to keep its last element; no issue is known",
    until="verl's server asks vLLM for what it reads alone",
    needed=False,
)

OUTPUTS = Patch(
    replaces="vllm.v1.engine.output_processor:OutputProcessor.add_request",
    sha256={
        "0.24.0": "aac8b9b79c4bbaa34ac232e635a17fbd64e6934768ac5d92f6e37ea7ee977b97",
        "0.29.0": "aac8b9b79c4bbaa34ac232e635a17fbd64e6934768ac5d92f6e37ea7ee977b97",
    },
    by=add_request,
    **_WHY,
)
REQUESTS = Patch(
    replaces="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate",
    sha256={"0.9.1": "994d55e1584a3cc988f8b7f2754d553d1cbb66e97c510cefce0909ae4e97057f"},
    by=generate,
    **_WHY,
)
PATCHES = (OUTPUTS, REQUESTS)
