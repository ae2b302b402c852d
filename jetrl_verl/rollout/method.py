# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""vLLM's side of the flow: the quantisation method ``jetrl_fp8``.

A linear layer of vLLM gets two parameters, ``weight`` (E4M3 codes) and ``weight_scale_inv`` (FP32 block scales), in
exactly the layout the trainer sends. Nothing is transformed after loading, so each weight sync is an in-place copy into
live storage: CUDA graphs stay valid and sleep/wake restores the same tensors. The forward is ``kernels.fprop``, the
operator that the trainer calls, behind the torch dispatcher so that ``torch.compile`` keeps it whole; where a shared
operation has quantised the input as it wrote it (rollout/shared_operations.py), the multiplication alone.

It is deliberately not a subclass of vLLM's ``Fp8Config``: verl re-quantises BF16 weights for those, and vLLM rewrites
their scales at load. Ours never sees a BF16 weight.

Merged projections (qkv, gate_up) and tensor-parallel shards come from vLLM's own block-scale weight loaders; which
layers take part comes from :mod:`jetrl_verl.layers`, as on the trainer's side.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.parameter import BasevLLMParameter, BlockQuantScaleParameter, ModelWeightParameter

from jetrl_verl import kernels, ops
from jetrl_verl.config.vllm_arguments import QUANT_METHOD
from jetrl_verl.layers import MERGED, UnsupportedLayer, plan_linears
from jetrl_verl.numerics import BLOCK, FP8_DTYPE, check_rule


@register_quantization_config(QUANT_METHOD)
class JetFP8Config(QuantizationConfig):
    """Configuration of the method, from ``hf_overrides.quantization_config``.

    Attributes:
        scale_rule: rule under which activations are quantised; the codes that arrive were made under the same one.
        unfit_layers: ``"stop"`` or ``"skip"``, see :func:`jetrl_verl.layers.plan_linears`.
        contract_check: whether a weight sync ends with the comparison of observe/contract.py.
        operations: ``"shared"`` runs the operations between the linears as the trainer does (jetrl_verl/ops),
            ``"stock"`` as vLLM does.
    """

    rollout = "fp8"
    """Format of the codes, as in ``jetrl.rollout``."""

    def __init__(self, scale_rule: str, unfit_layers: str, contract_check: bool, operations: str = "stock") -> None:
        super().__init__()
        check_rule(scale_rule)
        if operations not in ("shared", "stock"):
            raise ValueError(f"operations={operations} is not a choice of an engine; use shared or stock")
        self.operations = operations
        self.contract_check = contract_check
        self.scale_rule = scale_rule
        self.unfit_layers = unfit_layers
        self._hf_config: Any = None

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "JetFP8Config":
        return cls(
            config["scale_rule"], config["unfit_layers"], config["contract_check"], config.get("operations", "stock")
        )

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        self._hf_config = hf_config

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The format's method for a planned projection, BF16 for every other layer.

        Raises:
            UnsupportedLayer: the model, or this layer of it, cannot take part.
        """
        if not isinstance(layer, LinearBase):
            return None
        plans = plan_linears(self._hf_config, get_tensor_model_parallel_world_size(), unfit_layers=self.unfit_layers)
        suffix = ".".join(prefix.rsplit(".", 2)[-2:])
        pieces = MERGED.get(suffix, (suffix,))
        if any(piece not in plans for piece in pieces):
            raise UnsupportedLayer(f"layer {prefix} is a linear layer unknown to the FP8 flow; use precision=bf16")
        if not all(plans[piece].quantised for piece in pieces):
            return UnquantizedLinearMethod()
        return self.linear_method()

    def linear_method(self) -> "JetLinearMethod":
        return JetFP8LinearMethod(self)


def shares_operations() -> bool:
    """Whether the engine being built in this process was asked for shared operations."""
    engine = get_current_vllm_config_or_none()
    config = engine.quant_config if engine is not None else None
    return isinstance(config, JetFP8Config) and config.operations == "shared"


class JetLinearMethod(LinearMethodBase):
    """Linear whose weight arrives as codes and scales: what the formats share, the two parameters and their life."""

    codes: torch.dtype
    """Type of the codes."""

    def __init__(self, config: JetFP8Config) -> None:
        self.config = config

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``weight`` [N, K] of codes and the format's ``weight_scale_inv``, N and K of this rank's shard.

        Raises:
            UnsupportedLayer: activations other than BF16.
        """
        if params_dtype != torch.bfloat16:
            raise UnsupportedLayer(
                f"a quantised rollout needs rollout.dtype=bfloat16, vLLM was started with {params_dtype}"
            )
        weight_loader = extra_weight_attrs["weight_loader"]
        rows = sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        weight = ModelWeightParameter(
            data=torch.empty(rows, input_size_per_partition, dtype=self.codes),
            input_dim=1,
            output_dim=0,
            weight_loader=weight_loader,
        )
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale_inv", self.scales(layer, rows, input_size_per_partition, weight_loader))

    def scales(
        self, layer: torch.nn.Module, rows: int, columns: int, weight_loader: Callable[..., None]
    ) -> BasevLLMParameter:
        """FP32 scales of a ``[rows, columns]`` weight, in the parameter class by which vLLM's loaders place them."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: codes and scales are used as they arrive. verl calls this after every sync."""


@register_weight_loader_v2_supported_method
class JetFP8LinearMethod(JetLinearMethod):
    """Block-FP8 linear: E4M3 codes, one scale ``[N/128, K/128]`` per block."""

    codes = FP8_DTYPE

    def scales(
        self, layer: torch.nn.Module, rows: int, columns: int, weight_loader: Callable[..., None]
    ) -> BasevLLMParameter:
        # vLLM's block-scale loaders read it to place a merged or sharded piece.
        layer.weight_block_size = [BLOCK, BLOCK]
        return BlockQuantScaleParameter(
            data=torch.ones(rows // BLOCK, columns // BLOCK, dtype=torch.float32),
            input_dim=1,
            output_dim=0,
            weight_loader=weight_loader,
        )

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor | ops.Quantised, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` [..., K] BF16, or its codes [M, K], -> [..., N] BF16; bias is added in FP32 before the rounding.

        Parameters are written by weight syncs and by waking up, never by a kernel of a forward, so copies of the weight
        may begin under the kernel in front (``static_weight``).
        """
        weight = (layer.weight, layer.weight_scale_inv)
        if isinstance(x, ops.Quantised):
            return kernels.fprop_codes(x.codes, *weight, bias, static_weight=True)
        return kernels.fprop(x, *weight, bias, self.config.scale_rule, static_weight=True)
