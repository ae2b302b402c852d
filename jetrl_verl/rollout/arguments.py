# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine arguments that make a rollout run our linear layers and operations."""

import json
from collections.abc import Mapping
from typing import Any

from jetrl_verl.config.job import Job
from jetrl_verl.config.support.scopes import FUSIONS_OF_REDUCTIONS
from jetrl_verl.formats.catalog import VLLM_METHODS

WORKER_EXTENSION = "jetrl_verl.rollout.worker.JetWorkerExtension"
"""vLLM worker extension that receives the trainer's qdata; a subclass of verl's own."""

WORKER = "jetrl_verl.rollout.worker.JetWorker"
"""vLLM worker that runs the shared operations, or keeps an FP8 KV cache; a subclass of the platform's own."""

HYBRID = {"mamba_ssm_cache_dtype": "float32"}
"""vLLM's arguments for a model with delta nets, which change no other: FP32 states."""


def vllm_arguments(job: Job, user: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's ``engine_kwargs.vllm`` with our arguments filled in; the table of support refuses others for them.

    Always ``quantization``, ``hf_overrides`` (with what the job overrides in the trainer's model), ``load_format`` (the
    first sync fills all weights, whatever ``rollout.load_format`` says), ``worker_extension_cls``, ``HYBRID``, and
    ``language_model_only``, as the trainer sends a vision tower for images alone; ``worker_cls`` if operations are
    shared or the KV cache is FP8; ``compilation_config`` if the trainer repeats the ranks' sums. Idempotent.
    """
    arguments = dict(user or {})
    method = VLLM_METHODS[job.options.rollout]
    # The layers outside the contract are BF16 on both sides.
    quantization = {"quant_method": method, **job.for_vllm(), "modules_to_not_convert": ["lm_head"]}
    arguments["quantization"] = method
    own = _mapping(arguments.get("hf_overrides"))
    arguments["hf_overrides"] = {**job.overrides, **own, "quantization_config": quantization}
    arguments["load_format"] = "dummy"
    arguments["worker_extension_cls"] = WORKER_EXTENSION
    arguments |= HYBRID | {"language_model_only": not job.images}
    compilation = _mapping(arguments.get("compilation_config"))
    if job.options.reduction == "ordered" and compilation is not None:  # verl refuses what is no mapping
        # vLLM turns some of these fusions on where it finds FlashInfer.
        passes = {**(compilation.get("pass_config") or {}), **dict.fromkeys(FUSIONS_OF_REDUCTIONS, False)}
        arguments["compilation_config"] = {**compilation, "pass_config": passes}
    if job.shared or job.cache.quantized:
        arguments["worker_cls"] = WORKER
    return arguments


def _mapping(argument: Any) -> Mapping[str, Any] | None:
    """An argument that is a mapping or the JSON of one, empty if it is absent; None for anything else."""
    argument = json.loads(argument) if isinstance(argument, str) else argument or {}
    return argument if isinstance(argument, Mapping) else None
