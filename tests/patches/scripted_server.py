# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's rollout server and vLLM's ``AsyncLLM`` over a scripted engine core that gives each request one token a step.

No GPU, no model, no Ray."""

import asyncio
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jetrl_verl.patches.generation import PATCHES
from jetrl_verl.patches.patch import Patch

PROMPT = 64
LONGEST = 32768


def tokenizer_of(text: str, vocabulary: int = 8192) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as Qwen3's, trained on a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class ScriptedCore:
    """Replaces ``AsyncLLM``'s client of the engine core: one token a step for each request.

    Args:
        script: tokens ``[n]``; a request reads from its own place. steps_wait: whether a step waits for :meth:`allow`.
        more: further fields of a request's output, given its number of tokens.
    """

    def __init__(
        self, script: np.ndarray, steps_wait: bool = False, more: Callable[[int], dict[str, Any]] | None = None
    ) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.script, self.steps_wait, self.more = script, steps_wait, more
        self.resources = SimpleNamespace(engine_dead=False)
        self.running: dict[str, tuple[Any, int]] = {}
        self.requests: list[Any] = []
        """Requests as the core gets them."""
        self.aborted: list[str] = []
        self.paused = False
        self._steps = asyncio.Semaphore(0)
        self._ended: list[Any] = []
        self._changed = asyncio.Event()
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._steps.release()

    async def add_request_async(self, request: Any) -> None:
        self.requests.append(request)
        self.running[request.request_id] = (request, 0)
        self._changed.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        """As vLLM's core: every running or waiting request ends with ``abort`` and without another token."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        assert mode == "abort"
        self.paused = True
        for request_id in list(self.running):
            self._ended.append(EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT))
            del self.running[request_id]
        self._changed.set()

    def shutdown(self, timeout: float | None = None) -> None: ...

    async def resume_scheduler_async(self) -> None:
        self.paused = False
        self._changed.set()

    async def get_output_async(self) -> Any:
        while not self._ended and (self.paused or not self.running):
            self._changed.clear()
            await self._changed.wait()
        if self.steps_wait and not self._ended:
            step = asyncio.ensure_future(self._steps.acquire())
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({step, changed}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if not step.done():
                step.cancel()
                return await self.get_output_async()
            if not self.running and not self._ended:
                return await self.get_output_async()
        frames = self._encoder.encode(self._step())
        outputs = self._decoder.decode([bytes(frame) for frame in frames])
        await asyncio.sleep(0)  # a socket's read lets other tasks run
        return outputs

    def _step(self) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.outputs import LogprobsLists

        if self._ended:
            outputs, self._ended = self._ended, []
            return EngineCoreOutputs(outputs=outputs)
        running = list(self.running.items())
        place = np.array([int(request.external_req_id.rpartition("-")[2]) + done for _, (request, done) in running])
        tokens = self.script[place % len(self.script)].astype(np.int32)
        log_probs = LogprobsLists(tokens[:, None], log_probs_of(place)[:, None], (place % 7 + 1).astype(np.int32))
        outputs = []
        for i, (token, (request_id, (request, done))) in enumerate(zip(tokens.tolist(), running, strict=True)):
            params = request.sampling_params
            reason = FinishReason.LENGTH if done + 1 == params.max_tokens else None
            stop = None
            if token in (params.stop_token_ids or ()):
                reason, stop = FinishReason.STOP, token
            one = log_probs.slice_request(i, 1) if params.logprobs is not None else None
            more = self.more(done) if self.more is not None else {}
            outputs.append(EngineCoreOutput(request_id, [token], one, finish_reason=reason, stop_reason=stop, **more))
            if reason is None:
                self.running[request_id] = (request, done + 1)
            else:
                del self.running[request_id]
        return EngineCoreOutputs(outputs=outputs)


def log_probs_of(place: np.ndarray) -> np.ndarray:
    """A negative FP32 number for each place of the script, with all bits of its mantissa in use."""
    return -np.abs(np.sin(place.astype(np.float64) + 1)).astype(np.float32) * 3


def scripted_server(core: ScriptedCore, tokenizer: PreTrainedTokenizerFast, **config: Any) -> Any:
    """verl's server with vLLM's ``AsyncLLM`` on top of ``core``.

    Request ids end in ``-<place in the script>``.
    """
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    engine = object.__new__(AsyncLLM)
    engine.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))
    engine.model_config = SimpleNamespace(is_encoder_decoder=False)
    engine.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
    engine.engine_core, engine.output_handler = core, None
    engine.output_processor = OutputProcessor(tokenizer, log_stats=False)
    engine.input_processor = SimpleNamespace(
        process_inputs=_process_inputs,
        process_inputs_async=_process_inputs_async,
        assign_request_id=InputProcessor.assign_request_id,
    )
    engine.log_requests = engine.log_stats = False
    engine.logger_manager = None

    async def nothing() -> None: ...

    engine.renderer = SimpleNamespace(
        clear_mm_cache_async=nothing, stat_mm_cache=nothing, mm_processor_cache=None, shutdown=lambda: None
    )
    engine._supported_tasks = ("generate",)
    server = object.__new__(vLLMHttpServer)
    server.engine = engine
    server.config = _Config(max_model_len=LONGEST, prompt_length=PROMPT, response_length=LONGEST - PROMPT)
    vars(server.config).update(full_determinism=False, enable_rollout_routing_replay=False, mtp=None, **config)
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.replica_rank = server.node_rank = server._admitting = 0
    server.global_steps = 3
    server._disaggregation_role = "null"
    server._submission_paused = server._rejecting = False
    server._resume_event = asyncio.Event()
    server._resume_event.set()
    return server


class _Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


async def _process_inputs_async(*args: Any, **kwargs: Any) -> Any:
    """As vLLM 0.29 asks."""
    return _process_inputs(*args, **kwargs)


def _process_inputs(request_id: str, prompt: Any, params: Any, **_: Any) -> Any:
    """What ``InputProcessor`` makes of a prompt of tokens."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt["prompt_token_ids"],
        mm_features=None,
        sampling_params=params.clone(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def stock_in_place(patch: Patch) -> Any:
    """A context in which a patch's function is the stock one."""
    patch.apply()
    holder_name, _, name = patch.function.rpartition(".")
    holder = getattr(importlib.import_module(patch.module), holder_name)
    # Replaced at run time, or in a checkout that `jetrl patch` has written to.
    stock = getattr(getattr(holder, name), "_jetrl_stock", None) or getattr(holder, f"_stock_{name}")
    return mock.patch.object(holder, name, stock)


@contextmanager
def functions_of(row: str) -> Iterator[None]:
    """The patched functions, or the stock ones that they replace."""
    with ExitStack() as stack:
        for patch in PATCHES:
            patch.apply()
            if row == "stock":
                stack.enter_context(stock_in_place(patch))
        yield
