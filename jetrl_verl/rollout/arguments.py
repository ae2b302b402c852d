# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine arguments that make a rollout run our linear layers and operations."""

from collections.abc import Mapping
from typing import Any

from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.vllm_arguments import fill, quantization_arguments, unfused_reductions
from jetrl_verl.formats.catalog import cache_traits

WORKER_EXTENSION = "jetrl_verl.rollout.worker.JetWorkerExtension"
"""vLLM worker extension that receives the trainer's qdata; a subclass of verl's own."""

WORKER = "jetrl_verl.rollout.worker.JetWorker"
"""vLLM worker that runs the shared operations, or keeps an FP8 KV cache; a subclass of the platform's own."""


def vllm_arguments(options: JetConfig, user: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's ``engine_kwargs.vllm`` with our arguments filled in.

    Always ``quantization``, ``hf_overrides`` and ``worker_extension_cls``; ``worker_cls`` if operations are shared or
    the KV cache is FP8; ``compilation_config`` if the trainer repeats the ranks' sums. Idempotent.

    Raises:
        UnsupportedConfiguration: the user set one of them to something else.
    """
    arguments = quantization_arguments(options, user)
    arguments |= unfused_reductions(options, arguments)
    fill(arguments, "worker_extension_cls", WORKER_EXTENSION, options)
    if options.operations == "shared" or cache_traits(options.kv_cache).quantized:
        # The table of support refuses a worker of the user's own.
        arguments["worker_cls"] = WORKER
    return arguments
