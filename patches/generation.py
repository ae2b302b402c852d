# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What verl's rollout server does for each token: it keeps it, with its log-probability.

verl 0.9.1's server answers a call once, when the response is complete, and of the answer it reads tokens and
log-probabilities. It asks vLLM for more. For each token of each request vLLM makes an output of what there is so far
and wakes the request's task, which drops the output; it turns the token into text, twice; and it keeps the
log-probability as an object in a dictionary, two of many that Python's garbage collector goes through again and again.
One thread does this for all requests, so with many of them it takes longer than the GPU's step.

Three things differ in a request of that server, and nothing in its answer:

* vLLM makes its first output and its last one, and none between. The first one stays: until it is there, the server
  counts a request as one that is being admitted, and a weight sync waits for those before it aborts what runs.
* No text is made, unless the request has stop strings, which are looked for in it.
* Log-probabilities are kept as numbers in a list, unless the request asks for those of other tokens, too.

Whatever ends a request gives the last output, with all tokens and log-probabilities so far: its length, a stop, an
abort, a pause. Which requests are the server's is said by the call: it sets :data:`FIRST_AND_LAST` in its own context,
in which vLLM adds the request. So two requests may have one id, as under ``full_determinism``, and whoever else uses
the engine, as vLLM's HTTP server does, has what it asked for.
"""

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from jetrl_verl.patches.patch import Patch

REACHES = (
    "vllm.v1.engine.async_llm:AsyncLLM.add_request",
    "vllm.v1.engine.logprobs:LogprobsProcessor.update_from_output",
    "vllm.v1.engine.output_processor:RequestState.logprobs_processor",
    "vllm.v1.engine.output_processor:RequestState.make_request_output",
    "vllm.v1.engine.output_processor:RequestState.output_kind",
)
"""vLLM adds a request in its caller's context, and asks the request's state for outputs and for what they are of."""

FIRST_AND_LAST: ContextVar[bool] = ContextVar("jetrl_first_and_last", default=False)
"""Whether a request that is added now is read when it is admitted and when it has ended, and not in between."""


def add_request(stock, self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    known = request.request_id in self.request_states  # more input for a request that streams it
    stock(self, request, *args, **kwargs)
    if known or not FIRST_AND_LAST.get():
        return
    state = self.request_states[request.request_id]
    # Several responses to one request are told apart by each of their outputs.
    if state.parent_req is None and state.output_kind.name == "CUMULATIVE":
        _make_first_and_last(state)
        kept = state.logprobs_processor
        if kept.num_logprobs == 0 and kept.num_prompt_logprobs is None:
            state.logprobs_processor = _SampledLogProbs()


def _make_first_and_last(state: Any) -> None:
    """Leave out a request's outputs between its first and its last one: behind the first it asks for the last alone."""
    make = state.make_request_output

    def make_first(*args: Any, **kwargs: Any) -> Any:
        output = make(*args, **kwargs)
        if output is not None:
            del state.make_request_output  # from now on the class's own again
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
    """In the place of vLLM's ``LogprobsProcessor``: of each position the log-probability of the sampled token.

    An answer has it as its ``logprobs``; an iteration gives what the position's dictionary is asked for in verl,
    ``position[token].logprob``. The collector has no reason to look at lists of numbers.
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
        # Column 0 is the sampled token; there are others if another request of the batch asks for them.
        self.tokens += new.logprob_token_ids[:, 0].tolist()
        values = new.logprobs[:, 0].tolist()
        self.values += values
        for value in values:
            self.cumulative_logprob += value

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[_SampledLogProb]:
        """One object, which stands for each position in its turn."""
        position = _SampledLogProb()
        for position.token, position.logprob in zip(self.tokens, self.values, strict=True):
            yield position


async def generate(stock, self: Any, prompt_ids: Any, sampling_params: dict, *args: Any, **kwargs: Any) -> Any:
    from vllm.v1.engine import output_processor

    if not sampling_params.get("stop"):
        sampling_params = {"detokenize": False} | sampling_params
    # Absent where vLLM's function did not fit and the run goes on without its patch.
    announced = getattr(output_processor, "FIRST_AND_LAST", None)
    if announced is None:
        return await stock(self, prompt_ids, sampling_params, *args, **kwargs)
    before = announced.set(True)
    try:
        return await stock(self, prompt_ids, sampling_params, *args, **kwargs)
    finally:
        announced.reset(before)


_SYMPTOM = "the rollout server makes an output, text and two objects of each token, and the GPU may wait for it"
_UPSTREAM = "the server iterates over vLLM's stream to keep its last element; no issue is known"
_UNTIL = "verl's server asks vLLM for what it reads alone"

OUTPUTS = Patch(
    replaces="vllm.v1.engine.output_processor:OutputProcessor.add_request",
    version="0.24.0",
    sha256="aac8b9b79c4bbaa34ac232e635a17fbd64e6934768ac5d92f6e37ea7ee977b97",
    by=add_request,
    symptom=_SYMPTOM,
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=False,
)
REQUESTS = Patch(
    replaces="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate",
    version="0.9.1",
    sha256="994d55e1584a3cc988f8b7f2754d553d1cbb66e97c510cefce0909ae4e97057f",
    by=generate,
    symptom=_SYMPTOM,
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=False,
)
PATCHES = (OUTPUTS, REQUESTS)
