# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's experts in the FP8 flow: parameters, weight sync, and the block around them.

``w13_weight [E, 2 I, H]`` and ``w2_weight [E, H, I]`` hold this rank's qdata as the trainer sends it, one tensor each,
and :func:`load_experts` copies it. With shared operations the block is a :class:`SharedMixture`: router, choice of
experts, products and the shared expert's gate are the trainer's operators. The preceding norm hands over qdata for the
experts and BF16 rows for the router; without a shared expert the following norm adds a token's rows
(kernels/combine_rms_norm.py).
"""

from collections.abc import Iterator
from typing import Any

import torch

from jetrl_verl import formats, kernels
from jetrl_verl.config.support.scopes import VLLM
from jetrl_verl.config.support.table import refuse
from jetrl_verl.formats.format import SCALE_SUFFIX
from jetrl_verl.models import family
from jetrl_verl.models.families.base import Experts, leaf, place
from jetrl_verl.reference import QuantizedTensor, UncombinedRows
from jetrl_verl.rollout import vllm_compat as vllm
from jetrl_verl.rollout.row_parallel import reduce_ranks

REACHES = (
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeDecoderLayer.forward",
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.forward",
)
"""Code that passes a block's rows to the following norm unchanged; scripts/reach.py watches it."""


class JetExpertsMethod(vllm.FusedMoEMethodBase):
    """Experts whose weights arrive as qdata and scales."""

    def __init__(self, config: Any, layer: vllm.RoutedExperts) -> None:
        super().__init__(layer.moe_config)
        self.config = config
        self.format = formats.get(config.format_name)
        parallel = layer.moe_config.moe_parallel_config
        if parallel.use_ep:
            refuse("expert_parallel", precision=config.precision, key=f"{VLLM}.enable_expert_parallel", value="true")
        if parallel.dp_size > 1:
            scope = f"{VLLM}.data_parallel_size={parallel.dp_size}"
            refuse("mixture_over_replicas", what=f"the mixture of experts {config.path}", scope=scope)
        if parallel.is_sequence_parallel:  # of expert parallelism, which is refused
            raise ValueError("experts split by sequence: each rank has a part of every expert")
        if layer.activation != vllm.MoEActivation.SILU:
            why = f"experts multiply by SiLU, and its activation is {layer.activation.value}"
            what = f"the mixture of experts {config.path}"
            refuse("expert_activation", precision=config.precision, what=what, why=why)
        for wrong, what in (
            (layer.use_grouped_topk or layer.scoring_func != "softmax", "a router other than softmax and top-k"),
            (layer.e_score_correction_bias is not None, "a router with a correction bias"),
            (layer.apply_router_weight_on_input, "a routing weight on the experts' input"),
        ):
            if wrong:
                refuse("layer_replaced_in_vllm", what=what)

    def create_weights(
        self,
        layer: vllm.RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Register qdata and scales of this rank's part, with the names and shapes of vLLM's block-FP8 experts, so that
        its loader fills them from an exported folder.

        Raises:
            UnsupportedConfiguration: activations other than BF16.
        """
        self.config.check_dtype(params_dtype)
        inner = intermediate_size_per_partition
        for name, n, k in (("w13_weight", 2 * inner, hidden_size), ("w2_weight", hidden_size, inner)):
            qdata = torch.empty(num_experts, *self.format.qdata_shape(n, k), dtype=self.format.dtype)
            scales = torch.ones(num_experts, *self.format.scales_shape(n, k), dtype=self.format.scale_dtype)
            layer.register_parameter(name, torch.nn.Parameter(qdata, requires_grad=False))
            layer.register_parameter(name + SCALE_SUFFIX, torch.nn.Parameter(scales, requires_grad=False))
            vllm.set_weight_attrs(layer.get_parameter(name), attributes)
            block_scales = {"quant_method": vllm.FusedMoeWeightScaleSupported.BLOCK.value}
            vllm.set_weight_attrs(layer.get_parameter(name + SCALE_SUFFIX), attributes | block_scales)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave qdata and scales as they arrived."""

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: no vLLM kernel runs."""

    def experts(self, layer: vllm.RoutedExperts, x: QuantizedTensor, logits: torch.Tensor) -> UncombinedRows:
        """This rank's outputs of each token's experts, chosen by FP32 logits ``[T, E]``."""
        weights, segments, rows = kernels.route_and_permute(logits, x, layer.top_k, layer.renormalize)
        gate_up = QuantizedTensor(layer.w13_weight, layer.w13_weight_scale_inv)
        down = QuantizedTensor(layer.w2_weight, layer.w2_weight_scale_inv)
        # Parameters are constant during a forward, and the preceding kernel writes `rows` alone.
        rule = self.config.scale_rule
        y, *_ = self.format.experts(rows, weights, segments, gate_up, down, rule, static_weight=True)
        return UncombinedRows(y, segments.row)

    @property
    def is_monolithic(self) -> bool:
        """True: vLLM passes router logits instead of chosen experts."""
        return True

    def apply_monolithic(
        self, layer: vllm.RoutedExperts, x: torch.Tensor, router_logits: torch.Tensor, input_ids: Any = None
    ) -> torch.Tensor:
        """Called by vLLM if operations are stock."""
        quantized = self.format.quantize_activation(x, self.config.scale_rule)
        return kernels.combine(*self.experts(layer, quantized, router_logits.float()))


class SharedMixture:
    """Mixin of vLLM's blocks: router, experts and shared expert with the trainer's operations.

    Attributes:
        adds_rows: add a token's rows here, not in the following norm, so that ``jetrl diff`` can record both.
        parts: the block's name of its shared expert, that one's of merged projection, activation and output projection,
            and the block's of its gate; empty without one.
    """

    adds_rows = False
    parts: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse a block that the shared operations do not cover."""
        routed = self.experts.routed_experts
        if not isinstance(routed.quant_method, JetExpertsMethod):
            raise TypeError(f"shared operations: experts are run by {type(routed.quant_method).__name__}, not by ours")
        self.method: JetExpertsMethod = routed.quant_method
        config = self.method.config
        if (self.shared_expert is not None) != bool(self.parts):
            why = f"vLLM's class has {'no' if self.parts else 'a'} shared expert, unlike Hugging Face's"
            refuse("shared_expert", precision=config.precision, what=f"the mixture of experts {config.path}", why=why)
        if self.parts and self._shared_parts()[2].reduce_results:
            refuse("layer_replaced_in_vllm", what="a shared expert that adds its ranks' products itself")
        if self.tp_size > 1 and config.reduction != "ordered":
            raise ValueError(f"shared operations: experts over {self.tp_size} GPUs need reduction=ordered")

    def _shared_parts(self) -> list[torch.nn.Module]:
        shared, *inner, gate = self.parts
        return [*(getattr(getattr(self, shared), name) for name in inner), getattr(self, gate)]

    def forward(self, x: QuantizedTensor) -> torch.Tensor | UncombinedRows:
        """``x`` with its BF16 rows as source -> rows for the following norm to add, or ``[T, H]`` BF16."""
        logits = kernels.logits(x.source, self.gate.weight)
        rows = self.method.experts(self.experts.routed_experts, x, logits)
        if not self.parts:
            if self.tp_size > 1:
                return reduce_ranks(kernels.combine(*rows))
            return kernels.combine(*rows) if self.adds_rows else rows
        gate_up, activation, down, gate = self._shared_parts()
        routed, (shared, _) = kernels.combine(*rows), down(activation(gate_up(x)[0]))
        if self.tp_size > 1:  # both in one collective
            routed, shared = reduce_ranks(torch.cat([routed, shared])).chunk(2)
        return kernels.add_shared_expert(routed, shared, kernels.logits(x.source, gate.weight))


class SharedQwen3Mixture(SharedMixture, vllm.Qwen3MoeSparseMoeBlock):
    """Qwen3's."""


# --- weight sync ------------------------------------------------------------------------------------------------------


def is_of_experts(name: str, config: Any) -> bool:
    """Whether a tensor of the trainer is qdata or scales of experts."""
    mixture = family(config).experts
    if mixture is None:
        return False
    location = place(name.removesuffix(SCALE_SUFFIX))
    return location is not None and location.module in (mixture.gate_up, mixture.down)


def _part(tensor: torch.Tensor, live: torch.Tensor, rank: int, halves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (this rank's part of ``tensor [E, N, K]``, ``live`` in that shape).

    With ``halves`` 2 rows are gate's, then up's, and a rank has rows of both; otherwise a rank has columns.
    """
    if halves == 1:
        width = live.shape[2]
        return tensor[:, :, rank * width : (rank + 1) * width], live
    rows = live.shape[1] // halves
    return tensor.unflatten(1, (halves, -1))[:, :, rank * rows : (rank + 1) * rows], live.unflatten(1, (halves, rows))


def load_experts(model: torch.nn.Module, name: str, tensor: torch.Tensor, rank: int) -> None:
    """Copy this rank's part of one expert tensor (:func:`is_of_experts`) into live storage.

    Args:
        model: vLLM's model of this worker. rank: tensor-parallel rank.

    Raises:
        ValueError: no layer of this name, or another shape.
    """
    weight = name.removesuffix(SCALE_SUFFIX)
    location, decoder = place(weight), family(model.config)
    mixture = decoder.experts
    parameter = dict(mixture.parameters)[leaf(weight)] + name.removeprefix(weight)
    layer = decoder.rollout_name(location.layer)
    live = getattr(model.get_submodule(f"{layer}.{mixture.vllm_module}"), parameter).data
    part, target = _part(tensor, live, rank, 2 if location.module == mixture.gate_up else 1)
    if part.shape != target.shape or part.dtype != live.dtype:
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} and this rank holds {list(live.shape)} {live.dtype} of it"
        )
    target.copy_(part)


def expert_parameters(
    layer: vllm.RoutedExperts, mixture: Experts
) -> Iterator[tuple[str, str, int, slice, slice, tuple[int, int]]]:
    """The parts of a layer's experts that this worker has, by shapes and ranks alone.

    Yields:
        (trainer's name, vLLM's name, number of stacked matrices, this worker's rows and columns of each matrix, shape
        ``[E N, K]`` of the trainer's whole parameter).
    """
    experts, hidden, inner = layer.w2_weight.shape
    first, whole = layer.moe_config.tp_rank * inner, layer.moe_config.intermediate_size
    own, all_hidden = slice(first, first + inner), slice(0, hidden)
    names = dict(mixture.parameters)
    gate_up, down = leaf(mixture.gate_up), leaf(mixture.down)
    yield gate_up, names[gate_up], 2 * experts, own, all_hidden, (2 * experts * whole, hidden)
    yield down, names[down], experts, all_hidden, own, (experts * hidden, whole)
