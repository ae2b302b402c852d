# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker with our operations (``worker_cls``) and our weight sync (``worker_extension_cls``).

The worker is a class, not a hook, so that another engine of the process keeps vLLM's. The extension wraps verl's: an
exception while loading is kept, the remaining buckets are acknowledged unread, and it is raised at the end, because
verl's sender waits for every acknowledgement. After loading, it compares live parameters with the trainer's sums.
"""

import logging
import time
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from jetrl_verl.models import family
from jetrl_verl.patches.worker_errors import WorkerError, reported_to_server
from jetrl_verl.rollout.attention import share_attention_layers
from jetrl_verl.rollout.experts import is_of_experts, load_experts
from jetrl_verl.rollout.live import LiveMap, Placement, live_constants
from jetrl_verl.rollout.method import JetQuantizationConfig
from jetrl_verl.rollout.qk_norm import split_at_attention
from jetrl_verl.rollout.row_parallel import find_one_stage, fused_reductions, reduce_ranks, stock_all_reduce_matches
from jetrl_verl.rollout.sampler import share_sampler
from jetrl_verl.rollout.shared_operations import share_operations
from jetrl_verl.rollout.vllm_compat import current_platform, get_tp_group, platform_worker
from jetrl_verl.sync.contract import ContractReceiver
from jetrl_verl.sync.operations_probe import stated_operations, stated_probe, stated_reduction
from jetrl_verl.sync.statement import ContractViolation

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)
if not logger.handlers:
    # Whether the root logger of a vLLM worker has a handler depends on how the process was started.
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False


REACHES = (
    "vllm.config.model:ModelConfig.multimodal_config",
    "vllm.config.multimodal:MultiModalConfig.language_model_only",
)
"""What this file uses of vLLM through values; scripts/reach.py watches it."""

PlatformWorker = platform_worker()


class JetWorker(PlatformWorker):
    """Worker of an engine with ``operations: shared`` or ``kv_cache: fp8``."""

    @reported_to_server()
    def load_model(self, **options: Any) -> None:
        """Load the stock model, then replace its operations, before anything runs and before there is a KV cache.

        Raises:
            UnsupportedConfiguration: the shared operations do not cover the model.
        """
        super().load_model(**options)
        config = self.vllm_config.quant_config
        if config.operations != "shared":
            share_attention_layers(self.get_model(), config.kv_cache)
            return
        ordered = config.reduction == "ordered"
        if ordered and not stock_all_reduce_matches(get_tp_group().world_size, on_gpu=not current_platform.is_cpu()):
            with torch.inference_mode():
                find_one_stage(self.device)
        model = self.vllm_config.model_config
        images = model.multimodal_config is not None and not model.multimodal_config.language_model_only
        share_operations(self.get_model(), model.hf_config, config.kv_cache, images)
        if family(model.hf_config).delta_net is not None:
            # Imports classes of vLLM that touch the GPU, which a loaded hybrid has done already.
            from jetrl_verl.rollout.delta_net import fit_blocks

            fit_blocks(self.vllm_config)
        share_sampler(self.model_runner)
        split_at_attention(self.vllm_config.compilation_config)


class JetWorkerExtension(vLLMColocateWorkerExtension):
    """Worker extension of every precision but ``bf16``."""

    _jetrl_live: LiveMap | None = None
    _jetrl_vocabulary: tuple[int | None, Sequence[int]] = (None, ())

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None):
        """verl's mask of logits, which the trainer has to have, too."""
        super().monkey_patch_model(vocab_size, banned_token_ids)
        self._jetrl_vocabulary = vocab_size, banned_token_ids or ()

    @reported_to_server()
    def update_weights_from_ipc(self, peft_config: dict | None = None, base_sync_done=False, use_shm: bool = False):
        """One weight sync.

        Raises:
            ContractViolation: live parameters differ from what the trainer states.
            WorkerError: loading failed; raised after all buckets are acknowledged.
        """
        started, config = time.perf_counter(), self.model_runner.vllm_config.quant_config
        refusal = self._refusal(config)
        self._jetrl_failure: str | None = refusal
        if refusal is None:
            if self._jetrl_live is None:
                self._jetrl_live = LiveMap(self.model_runner.model)
                self._jetrl_placement, self._jetrl_receiver = Placement(self._jetrl_live), ContractReceiver()
                shared = config.operations == "shared"
                self._jetrl_constants = live_constants(self.model_runner.model, shared, *self._jetrl_vocabulary)
            self._jetrl_placement.start()
            self._jetrl_receiver.start()
        super().update_weights_from_ipc(peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
        if refusal is not None:
            raise ContractViolation(f"contract check: {refusal}")
        loaded = time.perf_counter()
        # A collective: a rank that failed to load takes part, or the others would wait for it.
        reduction = self._stated_reduction(config)
        if self._jetrl_failure is not None:
            raise WorkerError(f"weight sync: the rollout worker could not load the weights: {self._jetrl_failure}")
        if not config.contract_check:
            logger.info("jetrl weight sync: loaded in %.3f s, contract not checked", loaded - started)
            return
        counts = self._verify(config, reduction)
        self._jetrl_placement.commit()
        logger.info(
            "jetrl weight sync: loaded in %.3f s, contract of %d quantized and %d BF16 tensors held in %.3f s, "
            "live digest %#018x",
            loaded - started,
            counts["quantized"],
            counts["plain"],
            time.perf_counter() - loaded,
            counts["digest"],
        )

    def _refusal(self, config: Any) -> str | None:
        """Why this engine cannot have the trainer's contract; None if it can."""
        if not isinstance(config, JetQuantizationConfig):
            return (
                "the trainer's precision is not bf16, but vLLM was started with quantization="
                f"{config.get_name() if config else None}. Do not override rollout.engine_kwargs.vllm.quantization."
            )
        if (config.operations == "shared" or config.kv_cache.traits.quantized) and not isinstance(self, JetWorker):
            wanted = "trainer runs shared operations" if config.operations == "shared" else "KV cache is set to FP8"
            return (
                f"the {wanted}, but vLLM was started with worker_cls={self.vllm_config.parallel_config.worker_cls}. "
                "Do not override rollout.engine_kwargs.vllm.worker_cls."
            )
        if config.reduction == "ordered" and (fused := fused_reductions(self.vllm_config)):
            return (
                "the trainer repeats the sums of the rollout's ranks, but vLLM was started with "
                f"compilation_config.pass_config.{fused[0]}=true. Do not override "
                "rollout.engine_kwargs.vllm.compilation_config.pass_config."
            )
        return None

    def _stated_reduction(self, config: JetQuantizationConfig) -> dict[str, int]:
        if not config.contract_check or config.reduction != "ordered":
            return {}
        group = get_tp_group()
        return stated_reduction(self.device, group.world_size, lambda parts: reduce_ranks(parts[group.rank_in_group]))

    def _verify(self, config: JetQuantizationConfig, reduction: dict[str, int]) -> dict[str, int]:
        model = self.model_runner.model.config
        names = family(model)
        run = dict(
            rollout=True, mixture=None if names.experts is None else config.format_name, variant=names.variant(model)
        )
        operations = stated_operations(self.device, config.operations, config.kv_cache.traits.name, **run)
        return self._jetrl_receiver.verify(
            self._jetrl_live.tensors(),
            scale_rule=config.scale_rule,
            probe=stated_probe(self.device, config.format_name, config.scale_rule),
            operations=operations | reduction,
            constants=self._jetrl_constants,
        )

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], peft_config: dict, base_sync_done: bool):
        if self._jetrl_failure is not None:
            return
        try:
            # Receive, place; the check follows in update_weights_from_ipc.
            self._jetrl_receiver.take(weights)
            load = partial(self._load, peft_config=peft_config, base_sync_done=base_sync_done)
            self._jetrl_placement.place(weights, load)
        except Exception as error:
            logger.error("jetrl weight sync: loading failed\n%s", traceback.format_exc())
            # Text only: a traceback would keep the receiver's frames and their views of the buffer alive.
            self._jetrl_failure = f"{type(error).__name__}: {error}"

    def _load(self, weights: list[tuple[str, torch.Tensor]], **stock: Any) -> None:
        """Load experts ourselves, the rest through vLLM's loaders."""
        rest, model = [], self.model_runner.model
        for name, tensor in weights:
            if is_of_experts(name, model.config):
                load_experts(model, name, tensor, get_tp_group().rank_in_group)
            else:
                rest.append((name, tensor))
        if rest:
            super()._update_weights(rest, **stock)
