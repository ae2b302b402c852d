# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in the test's own process, with our method: its environment, its start, its worker, one question.

The engine's core and its only worker run in this process, so that a test can look at live parameters.
"""

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
"""Arguments of an engine that cuts prompts into chunks, reuses prefixes and, with a dozen requests, preempts."""

CACHE = dict(num_gpu_blocks_override=256)
"""Argument of an engine that has no pages to run out of: thousands of tokens. By its environment vLLM takes 1 GiB or
more, all of it written to before the first token."""


@contextmanager
def cpu_settings() -> Iterator[None]:
    """Environment of an engine on the CPU, to be entered before vLLM is imported."""
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


def start(folder: str | Path, options: JetConfig | None, **changes: Any) -> tuple[Any, Any]:
    """(vLLM, its worker) on the model in ``folder``, small and eager.

    Args:
        options: of the run, from which our arguments follow; stock vLLM if None.
        changes: further arguments of ``LLM``, or others than those here.
    """
    from vllm import LLM

    ours = vllm_arguments(options, None) if options is not None else {}
    small = dict(skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64, max_num_seqs=8)
    llm = LLM(str(folder), **(small | CACHE | ours | changes))
    if llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size > 1:
        return llm, None  # its workers are in processes of their own
    return llm, llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def prompt_log_probs(llm: Any, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities ``[len(prompt) - 1]`` of the prompt's tokens from the second on, nothing of it cached."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    entries = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in entries])


def sync(worker, items) -> None:
    """One weight sync: verl's sender in a thread, the worker's receiver here; raises what either raises.

    ``items`` are packed on their way, as in train/weight_stream.py.
    """
    import asyncio

    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from jetrl_verl.patches import weight_sync
    from jetrl_verl.sync.wire import packed

    weight_sync.TIME_LIMIT.apply()
    sender = BucketedWeightSender(worker._get_zmq_handle(), bucket_size_mb=1, use_shm=True)
    failures = []

    def send() -> None:
        try:
            asyncio.run(sender.async_send_weights(packed(items)))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        worker.update_weights_from_ipc(use_shm=True)
    finally:
        thread.join(timeout=60)
        # ZMQ unlinks a closed socket's file in the background; the next sync binds the same name and must come after.
        # Between two syncs of a run lie seconds.
        time.sleep(0.5)
    assert not thread.is_alive(), "the sender hangs"
    if failures:
        raise failures[0]
