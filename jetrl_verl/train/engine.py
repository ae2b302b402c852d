# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine in the FP8 flow; an engine without our config behaves as verl's.

Registered for (device, vendor), which verl looks up before device alone, when a precision's engine config is first
built in a process (targets/configs.py). Before FSDP wraps the model, linear layers become ``JetLinear`` in place and
the actor may run the shared operations; the weight sync carries qdata, scales and the contract; logits of vocabulary
entries without a token are masked.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.utils import tensordict_utils
from verl.utils import torch_functional as verl_functional
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.model import convert_weight_keys
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from jetrl_verl import formats, kernels
from jetrl_verl.algorithms.calibrated_clipping import CalibratedClip
from jetrl_verl.algorithms.invariant_scaling import check_resumed, fold_missing, folded_in
from jetrl_verl.algorithms.shadow import ShadowForwards, from_rank_0
from jetrl_verl.checkpoint import validation as resume
from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.config.environment import padding_words
from jetrl_verl.config.support.table import explained, refuse
from jetrl_verl.kernels import describe_backends
from jetrl_verl.metrics import hooks
from jetrl_verl.metrics.quantization import QuantizationMetrics, refuse_to_save_non_finite
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.chunked_logits import KEPT_BYTES, mask_unused
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.patches import weight_sync
from jetrl_verl.sync.wire import SyncStatistics, quantized_by
from jetrl_verl.train.flat_gather import FlatGather
from jetrl_verl.train.gather import Gather
from jetrl_verl.train.gathered import gathered_once
from jetrl_verl.train.shared_operations import TokenNumbers, ask_for, share_operations
from jetrl_verl.train.weight_stream import stated_routing, weight_stream

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_NUMBERS = "jetrl_numbers"
"""Key among verl's output arguments: names of the per-token values that ``lm_head`` returns instead of logits."""

_UNKEPT_SCALES = (
    "jetrl: the checkpoint %s has no scales of weights (its run had no jetrl.int8_scales=first, or an older version); "
    "this run computes them at its first weight sync and keeps those"
)

_FREES_EACH_PASS = (
    "jetrl: jetrl.gathered=batch has no effect on the %s, whose FSDP1 reshards after every forward and backward. "
    "Set %s.strategy=fsdp2."
)


def mask_unused_vocabulary(model: torch.nn.Module, used: int) -> None:
    """Mask vocabulary entries from ``used`` on, as the rollout does, so that padding gets no probability.

    Args:
        model: a decoder whose output embedding yields logits ``[..., V]``, overwritten in place from now on.
        used: entries with a token, ``len(tokenizer)``.
    """
    head = model.get_output_embeddings()
    if hasattr(head, "used_vocabulary"):  # the shared operation, which may not materialize logits
        head.used_vocabulary = used
    else:
        head.register_forward_hook(lambda module, inputs, logits: mask_unused(logits, used))


class _JetEngine(ShadowForwards):
    """Mixin of verl's policy and value engines."""

    _jetrl_metrics: QuantizationMetrics | None = None
    _jetrl_kept_scales: dict[str, torch.Tensor] | None = None
    """Under ``jetrl.int8_scales=first`` the scales of the run's first sync, the same on every rank."""

    _jetrl_flat: FlatGather | None = None
    """Under FSDP1, made at the first sync from the wrapped module."""

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        config = self.engine_config
        if not isinstance(config, JetFSDPEngineConfig):
            return module
        # The driver has checked a model that it can read; a remote one is read here first.
        with explained(self.model_config.path, config.jetrl.precision):
            self._convert(module, config)
        return module

    def _convert(self, module: torch.nn.Module, config: JetFSDPEngineConfig) -> None:
        options = config.jetrl
        self._jetrl_sync = SyncStatistics()
        if options.gathered == "batch" and config.strategy != "fsdp2" and self.rank == 0:
            # The critic alone: verl's default for it is FSDP1, also in jobs without one, so the driver cannot warn.
            logger.warning(_FREES_EACH_PASS, config.jetrl_role, config.jetrl_role)
        if config.jetrl_role == "actor":
            fold_missing(module, options.invariant_scaling)
            self._jetrl_kept_scales = {} if options.int8_scales == "first" else None
        if config.jetrl_role == "actor" and options.clip == "calibrated":
            self.calibrated_clip = CalibratedClip(options.clip_interval)
        if config.quantized_linears or config.jetrl_role == "actor":
            self._jetrl_plans = plan_linears(
                self.model_config.hf_config,
                config.jetrl_rollout_tp,
                unfit_layers=options.unfit_layers,
                format_name=options.rollout if config.jetrl_role == "actor" else formats.FLOW,
            )
        if config.jetrl_role == "actor":
            self._jetrl_routing = stated_routing(module)
            # vLLM reads from the same field whether the head is the embedding.
            tied = bool(self.model_config.hf_config.tie_word_embeddings)
            self._jetrl_gather = Gather(partial(quantized_by, self._jetrl_plans), tied)
        if config.quantized_linears:
            names = replace_linears(module, self._jetrl_plans, scale_rule=options.scale_rule, backward=options.backward)
            if self.rank == 0:
                backends = describe_backends(get_device_name())
                logger.info(
                    "jetrl: %d linear layers of the %s quantized (scale rule %s, backward %s); backends %s",
                    len(names),
                    config.jetrl_role,
                    options.scale_rule,
                    options.backward,
                    backends,
                )
        if config.shared_operations:
            counts = share_operations(module, options.kv_cache)
            self._jetrl_head = module.get_output_embeddings()  # the module inside FSDP
            if self.rank == 0:
                logger.info("jetrl: shared operations in the actor: %s", counts)
        if config.jetrl_role == "actor" and options.metrics:
            hooks.install_in_actor()
            traits = formats.traits_of(options.rollout)
            measured = traits is not None and traits.measured
            # The cache of a BF16 rollout may be quantized, too.
            if measured or (config.shared_operations and formats.cache_traits(options.kv_cache).quantized):
                number_format = formats.get(options.rollout) if measured else None
                self._jetrl_metrics = QuantizationMetrics(module, self._jetrl_plans, options.scale_rule, number_format)
        tokens = len(self.model_config.tokenizer) if self.model_config.tokenizer is not None else None
        output = module.get_output_embeddings() if config.jetrl_role != "critic" else None
        if tokens is not None and output is not None and output.weight.shape[0] > tokens:
            if self.model_config.use_fused_kernels:
                # The driver refuses this for a model that it can read (config/environment.py).
                words = padding_words(output.weight.shape[0] - tokens, self.model_config.path)
                refuse("fused_kernels_of_a_padded_vocabulary", **words)
            mask_unused_vocabulary(module, tokens)

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        """verl's pass over the micro-batches; frees cached qdata, and weights gathered for the batch, on exit."""
        try:
            with self._gathered():
                return super().forward_backward_batch(*args, **kwargs)
        finally:
            # FSDP1 reshards without assigning attributes, so qdata would stay while the rollout runs.
            for module in self.module.modules():
                if isinstance(module, JetLinear | JetExperts):
                    module.drop_qdata()

    def _gathered(self) -> AbstractContextManager[None]:
        config = self.engine_config
        once = isinstance(config, JetFSDPEngineConfig) and config.jetrl.gathered == "batch"
        if once and config.strategy == "fsdp2":
            return gathered_once(self.module, config.reshard_after_forward)
        return nullcontext()

    def get_per_tensor_param(self, **kwargs: Any):
        """Stream of the weight sync (sync/wire.py); verl's own unless this is the actor under our config."""
        config = self.engine_config
        if not isinstance(config, JetFSDPEngineConfig) or config.jetrl_role != "actor":
            return super().get_per_tensor_param(**kwargs)
        self._jetrl_sync = SyncStatistics()
        device = torch.device(get_device_name())
        # As verl's own stream, without adapters, which are not supported.
        if fsdp_version(self.module) == 2:
            params = convert_weight_keys(self.module.state_dict(keep_vars=True), self.module)
            gather = self._jetrl_gather
            weights = gather.stream(params, device, self._jetrl_sync)
        else:
            gather = self._jetrl_flat_gather()
            weights = gather.stream(device, self._jetrl_sync)
        stream = weight_stream(
            weights,
            config.jetrl,
            self._jetrl_plans,
            device,
            self._jetrl_sync,
            self._jetrl_kept_scales,
            self._jetrl_metrics,
            ranks=config.jetrl_rollout_tp,
            routing=self._jetrl_routing,
            tied=gather.tied,
        )
        return stream, None

    def _jetrl_flat_gather(self) -> FlatGather:
        if self._jetrl_flat is None:

            def sent_as(name: str) -> str:
                return next(iter(convert_weight_keys({name: None}, self.module.module)))

            tied = bool(self.model_config.hf_config.tie_word_embeddings)
            self._jetrl_flat = FlatGather(self.module, partial(quantized_by, self._jetrl_plans), tied, sent_as)
        return self._jetrl_flat

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's, after the files have been validated (checkpoint/validation.py)."""
        if isinstance(self.engine_config, JetFSDPEngineConfig):
            resume.check_checkpoint(local_path, self.rank, torch.distributed.get_world_size())
            check_resumed(local_path, folded_in(self.module.config))
            if self._jetrl_kept_scales is not None:
                self._load_kept_scales(Path(local_path) / resume.KEPT_SCALES)
        super().load_checkpoint(local_path, *args, **kwargs)

    def _load_kept_scales(self, file: Path) -> None:
        saved = from_rank_0(torch.load(file, map_location="cpu") if self.rank == 0 and file.exists() else None)
        if saved is None and self.rank == 0:
            logger.warning(_UNKEPT_SCALES, file.parent)
        self._jetrl_kept_scales = {name: scales.to(get_device_id()) for name, scales in (saved or {}).items()}

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's; refuses NaN and Inf, and names the space left on the disk if a write fails."""
        if not isinstance(self.engine_config, JetFSDPEngineConfig):
            return super().save_checkpoint(local_path, *args, **kwargs)
        refuse_to_save_non_finite(self.module)
        with resume.explained(local_path):
            super().save_checkpoint(local_path, *args, **kwargs)
            resume.drop_other_world_sizes(local_path, torch.distributed.get_world_size())
            if self._jetrl_kept_scales and self.rank == 0:
                torch.save(self._jetrl_kept_scales, Path(local_path) / resume.KEPT_SCALES)

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """verl's step, with the quantization metrics and the last weight sync's size and duration."""
        measured: dict[str, list[float]] = {}
        with self._jetrl_metrics.measuring(measured) if self._jetrl_metrics is not None else nullcontext():
            outputs = super().train_batch(data, loss_function)
        outputs["metrics"].update(measured)
        if isinstance(self.engine_config, JetFSDPEngineConfig) and self._jetrl_sync.bytes:
            sync = self._jetrl_sync
            outputs["metrics"]["jetrl/sync_megabytes"] = [sync.bytes / 2**20]
            outputs["metrics"]["jetrl/sync_stock_megabytes"] = [sync.stock_bytes / 2**20]
            outputs["metrics"]["jetrl/sync_seconds"] = [sync.seconds]
        return outputs


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class JetFSDPEngine(_JetEngine, FSDPEngineWithLMHead):
    """Policy (actor or reference) under FSDP1 or FSDP2."""

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict, dict]:
        """verl's; with shared operations ``lm_head`` returns per-token values instead of logits."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        config = self.engine_config
        if isinstance(config, JetFSDPEngineConfig) and config.shared_operations:
            names, numbers = self._token_numbers(output_args, micro_batch)
            output_args[_NUMBERS] = names
            ask_for(self._jetrl_head, numbers)
        return inputs, output_args

    def _token_numbers(self, output_args: dict, micro_batch: Any) -> tuple[list[str], TokenNumbers]:
        """Names and computation of the per-token values: log-probability of the next token, and what verl asks for."""
        asked = partial(tensordict_utils.get_non_tensor_data, micro_batch)
        following, rows = output_args["input_ids_rmpad_rolled"], None
        entropy = verl_functional.entropy_from_logits
        if asked("use_remove_padding", True):
            temperature = output_args["temperature_rmpad"]
            entropy = self.compute_entropy_from_logits  # compiled if configured, for packed batches alone
        else:
            lengths = micro_batch["input_ids"].offsets().diff()
            rows = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
            temperature = output_args["temperature"].repeat_interleave(lengths)
        # verl knows whether all temperatures are 1; then logits are not copied.
        unscaled = output_args.get("temperature_is_one", False)
        others = {"entropy": entropy, "sum_pi_squared": verl_functional.calculate_sum_pi_squared_from_logits}
        others = {name: function for name, function in others.items() if asked(f"calculate_{name}", False)}

        def compute(logits: torch.Tensor, piece: slice) -> list[torch.Tensor]:
            values = [kernels.log_probs(logits, following[piece, None], temperature[piece]).squeeze(1)]
            if others:
                scaled = logits if unscaled else logits / temperature[piece, None]
                values += [function(scaled) for function in others.values()]
            return values

        # With an entropy autograd saves several tensors of the size of the logits, so no logits are kept.
        return ["log_probs", *others], TokenNumbers(rows, compute, 0 if others else KEPT_BYTES)

    def prepare_model_outputs(self, output: Any, output_args: dict, micro_batch: Any, logits_processor_func: Any):
        """The per-token values of a micro-batch; verl's own unless operations are shared.

        Returns:
            ``log_probs``, ``entropy`` and ``sum_pi_squared`` if asked for, each jagged ``[sequences, tokens]`` FP32;
            the entry of a token describes the next one.
        """
        if _NUMBERS not in output_args:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        values = dict(zip(output_args[_NUMBERS], output.logits, strict=True))
        if tensordict_utils.get_non_tensor_data(micro_batch, "use_remove_padding", True):
            pad = output_args["pad_size"]
            values = {name: self._gather_and_unpad_packed(value, pad) for name, value in values.items()}
        offsets = micro_batch["input_ids"].offsets()
        return {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in values.items()}


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class JetFSDPEngineWithValueHead(_JetEngine, FSDPEngineWithValueHead):
    """Critic under FSDP1 or FSDP2."""


weight_sync.TIME_LIMIT.apply()
