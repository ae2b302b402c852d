# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in the test's own process: environment, start, weight sync and prompt log-probabilities. Its core
and its only worker run in this process, so that a test can look at live parameters."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.rollout.arguments import vllm_arguments

_ENGINES = count()

CROWDED = dict(
    max_model_len=128,
    max_num_batched_tokens=32,
    enable_chunked_prefill=True,
    enable_prefix_caching=True,
    block_size=16,
    num_gpu_blocks_override=24,
    logprobs_mode="processed_logprobs",
)
"""Arguments of an engine with chunked prefill, prefix caching and, with a dozen requests, preemption."""

CACHE = dict(num_gpu_blocks_override=256)
"""A KV cache of thousands of tokens, which no test fills. vLLM's default is 1 GiB or more, all of it written before the
first token."""


@contextmanager
def cpu_settings() -> Iterator[None]:
    """Environment of an engine on the CPU; enter it before vLLM is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # The weight sync's socket is named after it.
            "VERL_RAY_JOB_ID": f"test-{os.getpid()}-{next(_ENGINES)}",
        }.items():
            patch.setenv(name, value)
        yield


def start(folder: str | Path, options: JetConfig | None, images: bool = False, **changes: Any) -> tuple[Any, Any]:
    """(vLLM, its worker) on the model in ``folder``, small and eager.

    Args:
        options: of the run, which set the plugin's arguments; stock vLLM if None. images: whether it accepts images.
        changes: arguments of ``LLM`` that are added or replaced.
    """
    from vllm import LLM
    from vllm.model_executor.layers import rotary_embedding

    # vLLM keeps those of earlier engines in the process; those of an unused tower have no memory.
    rotary_embedding._ROPE_DICT.clear()
    arguments = vllm_arguments(Job(options, images=images), None) if options is not None else {}
    defaults = dict(skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64, max_num_seqs=8)
    llm = LLM(str(folder), **(defaults | CACHE | arguments | changes))
    if llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size > 1:
        return llm, None  # its workers run in other processes
    return llm, llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def prompt_log_probs(llm: Any, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities ``[len(prompt) - 1]`` of the prompt's tokens from the second on, without cached prefixes."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    entries = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in entries])


def model_log_probs(model, prompt: list[int]) -> torch.Tensor:
    """:func:`prompt_log_probs` of a model of transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
    return logits.log_softmax(dim=-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def sync(worker, parts) -> None:
    """One weight sync: verl's sender in a thread, the worker's receiver here; raises what either raises.

    ``parts`` are those of ``train.weight_stream.sync_parts``.
    """
    import asyncio

    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from jetrl_verl.patches import weight_sync
    from jetrl_verl.sync.wire import packed

    weight_sync.WATCH.apply()
    sender = BucketedWeightSender(worker._get_zmq_handle(), bucket_size_mb=1, use_shm=True)
    failures = []

    def send() -> None:
        try:
            asyncio.run(sender.async_send_weights(packed(parts)))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        worker.update_weights_from_ipc(use_shm=True)
    finally:
        thread.join(timeout=60)
        # ZMQ unlinks a closed socket's file in the background, and the next sync binds the same name. In a run, seconds
        # pass between two syncs.
        time.sleep(0.5)
    assert not thread.is_alive(), "the sender hangs"
    if failures:
        raise failures[0]
