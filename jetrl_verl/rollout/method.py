# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's quantization methods for our formats; one of them, ``jetrl_bf16``, quantizes nothing.

A linear layer has two parameters, ``weight`` (qdata) and ``weight_scale_inv`` (FP32 scales), in the layout that the
trainer sends. Nothing is transformed after loading: a weight sync copies into live storage, so CUDA graphs stay valid.
It is not a subclass of vLLM's ``Fp8Config``, since verl re-quantizes BF16 weights for those and vLLM rewrites their
scales at load. ``jetrl_bf16`` exists because a quantization configuration is how our options reach a worker.
"""

from collections.abc import Callable
from typing import Any

import torch

from jetrl_verl import formats
from jetrl_verl.config.job import ROLLOUT_OPTIONS
from jetrl_verl.config.support.scopes import VLLM
from jetrl_verl.config.support.table import explained, refuse
from jetrl_verl.formats.format import SCALE_SUFFIX
from jetrl_verl.models import family
from jetrl_verl.models.families.base import place
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.patches.worker_errors import reported_to_server
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.rollout import vllm_compat as vllm
from jetrl_verl.rollout.experts import JetExpertsMethod
from jetrl_verl.rollout.row_parallel import order_reduction


class JetQuantizationConfig(vllm.QuantizationConfig):
    """Configuration of a method, from ``hf_overrides.quantization_config``, where the driver put it (``Job.for_vllm``).

    Attributes:
        scale_rule: rule for activations, the same as that of the weights.
        unfit_layers: ``"stop"`` or ``"skip"``, see :func:`jetrl_verl.models.plan.plan_linears`.
        contract_check: whether a weight sync ends with the comparison of sync/contract.py.
        operations: ``"shared"`` or ``"stock"``: whose operations run between the linear layers.
        reduction: ``"ordered"`` adds the products of tensor-parallel ranks as the trainer does (row_parallel.py).
        precision: of the run, for messages.
        kv_cache: format of keys and values (attention.py).
    """

    format_name: str
    """Format of the linear layers; set by the subclasses in ``CONFIGS``."""

    def __init__(
        self,
        precision: str,
        scale_rule: str,
        unfit_layers: str,
        contract_check: bool,
        operations: str,
        reduction: str,
        kv_cache: str,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.kv_cache = formats.kv_cache(kv_cache)
        self.operations = operations
        self.reduction = reduction
        self.contract_check = contract_check
        self.scale_rule = scale_rule
        self.unfit_layers = unfit_layers
        self._hf_config: Any = None

    def get_name(self) -> str:
        return formats.VLLM_METHODS[self.format_name]

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "JetQuantizationConfig":
        return cls(**{name: config[name] for name in ROLLOUT_OPTIONS})

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        self._hf_config = hf_config

    @reported_to_server()
    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> vllm.QuantizeMethodBase | None:
        """The format's method for a planned projection or for experts, vLLM's BF16 method for every other layer.

        Raises:
            UnsupportedConfiguration: the model or this layer is not supported.
        """
        if not isinstance(layer, vllm.LinearBase | vllm.RoutedExperts):
            return None
        with explained(self.path, self.precision):
            return self._method_of(layer, prefix)

    def _method_of(self, layer: torch.nn.Module, prefix: str) -> vllm.QuantizeMethodBase:
        location, names = place(prefix), family(self._hf_config)
        if location is None or location.layer != f"{names.rollout_layers}.{location.index}":
            return vllm.UnquantizedLinearMethod()  # a vision tower
        ranks = vllm.get_tensor_model_parallel_world_size()
        plans = plan_linears(self._hf_config, ranks, unfit_layers=self.unfit_layers, format_name=self.format_name)
        if isinstance(layer, vllm.RoutedExperts):
            return JetExpertsMethod(self, layer) if plans[names.experts.down].quantized else None
        if names.experts is not None and location.module == names.experts.router:
            return vllm.UnquantizedLinearMethod()
        pieces = names.pieces.get(location.module)
        if pieces is None:
            refuse("layer_replaced_in_vllm", what=f"the linear layer {prefix}, which its family does not have,")
        if not all(plans[piece].quantized for piece in pieces):
            return vllm.UnquantizedLinearMethod()
        # The output of a shared expert is added over ranks with that of the experts.
        reduces = names.experts is None or location.module != names.down
        return JetLinearMethod(self, reduces)

    @property
    def path(self) -> str:
        """Of the model, for messages."""
        return getattr(self._hf_config, "_name_or_path", "") or "of this engine"

    @reported_to_server()
    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ``UnsupportedConfiguration`` for activations other than BF16."""
        if dtype != torch.bfloat16:
            value = str(dtype).removeprefix("torch.")
            refuse("rollout_dtype", precision=self.precision, key=f"{VLLM}.dtype", value=value)


def _config_class(format_name: str) -> type[JetQuantizationConfig]:
    name = f"Jet{format_name.upper()}Config"
    config = type(name, (JetQuantizationConfig,), {"format_name": format_name, "__module__": __name__})
    globals()[name] = config  # pickled by this name
    return config


CONFIGS = {method: _config_class(format_name) for format_name, method in formats.VLLM_METHODS.items()}
"""Name of a method -> its configuration class."""


@vllm.register_weight_loader_v2_supported_method
class JetLinearMethod(vllm.LinearMethodBase):
    """Linear layer whose weight arrives as qdata and scales of ``format``.

    Attributes:
        reduces: whether a row-parallel layer adds its ranks' products itself.
    """

    def __init__(self, config: JetQuantizationConfig, reduces: bool = True) -> None:
        self.config, self.reduces = config, reduces
        self.format = formats.get(config.format_name)
        self.format.check_rule(config.scale_rule)

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
        """Register ``weight`` [N, K] of qdata and its scales ``weight_scale_inv``, N and K of this rank's shard.

        Raises:
            UnsupportedConfiguration: activations other than BF16.
        """
        self.config.check_dtype(params_dtype)
        weight_loader = extra_weight_attrs["weight_loader"]
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        layer.logical_widths = output_partition_sizes
        qdata = torch.empty(self.format.qdata_shape(rows, columns), dtype=self.format.dtype)
        weight = vllm.ModelWeightParameter(data=qdata, input_dim=1, output_dim=0, weight_loader=weight_loader)
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight" + SCALE_SUFFIX, self._scales(layer, rows, columns, weight_loader))

    def _scales(
        self, layer: torch.nn.Module, rows: int, columns: int, weight_loader: Callable[..., None]
    ) -> vllm.BasevLLMParameter:
        """Scales of a ``[rows, columns]`` weight, in the parameter class that vLLM's loaders place them by."""
        scales = torch.ones(self.format.scales_shape(rows, columns), dtype=self.format.scale_dtype)
        if self.format.columns_per_scale is None:
            return vllm.ChannelQuantScaleParameter(data=scales, output_dim=0, weight_loader=weight_loader)
        # Read by vLLM's block-scale loaders to place a merged or sharded piece.
        layer.weight_block_size = [self.format.rows_per_scale, self.format.columns_per_scale]
        return vllm.BlockQuantScaleParameter(data=scales, input_dim=1, output_dim=0, weight_loader=weight_loader)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave qdata and scales as they arrived. verl calls this after every sync."""
        if self.config.reduction == "ordered" and self.reduces:
            order_reduction(layer)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor | QuantizedTensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` [..., K] BF16, or quantized [M, K], -> [..., N] BF16; bias is added in FP32 before the rounding.

        Only weight syncs and wake-ups write parameters, so copies of the weight may start during the preceding kernel
        (``static_weight``).
        """
        weight = QuantizedTensor(layer.weight, layer.weight_scale_inv)
        return self.format.linear(x, weight, bias, self.config.scale_rule, static_weight=True)
