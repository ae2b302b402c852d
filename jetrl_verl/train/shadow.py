# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""BF16 shadow forwards of an FP8 actor, which calibrated clipping compares with.

On a calibration step ``infer_batch`` runs a second time with BF16 linear layers, before any update; its
log-probabilities travel with each sequence as the field ``shadow_log_probs``. ``train_batch`` runs a second BF16
forward right before each update, and reads the FP8 ratios off the training forward through the loss function. The BF16
forward is the same model with its quantized layers switched back to the stock classes, on the same parameters.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.utils.device import get_device_id
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding

from jetrl_verl.algorithms.calibrated_clipping import CalibratedClip
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.train.features import Feature, from_rank_0

SHADOW = "shadow_log_probs"
"""Field of a batch: log-probabilities of the BF16 forward at pi_old, nested like verl's ``log_probs``."""

REACHES = ("verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_data_parallel_group",)
"""What this file uses of verl through values; scripts/reach.py watches it."""

_RATIO = "shadow_log_ratio"
_STATE_FILE = "calibrated_clip.json"


@contextmanager
def bf16_linears(model: nn.Module) -> Iterator[None]:
    """Inside the block quantized layers of ``model`` are the stock ones that they replaced.

    Run forwards under autocast, and do not leave the block between a forward and its backward.
    """
    layers = [(module, type(module)) for module in model.modules() if isinstance(module, JetLinear | JetExperts)]
    for layer, _ in layers:
        layer.drop_qdata()
        layer.__class__ = layer.stock_class
    try:
        yield
    finally:
        for layer, quantized_class in layers:
            layer.__class__ = quantized_class
            # A gather inside the block replaced the weight without dropping the qdata.
            layer.drop_qdata()


class CalibratedClipping(Feature):
    """The bounds are written into ``clip_ratio_low`` and ``clip_ratio_high`` of the loss function's actor config, so
    any loss that reads them is calibrated."""

    _nominal_low: float | None = None

    def install(self, module: nn.Module) -> None:
        self.clip = CalibratedClip(self.options.clip_interval)

    def infer_batch(self, stock: Callable, data: TensorDict, loss_function: Callable | None = None) -> Any:
        """verl's inference; a calibration step adds the BF16 policy's log-probabilities."""
        outputs = stock(data, loss_function)
        if loss_function is None:
            self.clip.start_step(get_device_id(), self.engine.get_data_parallel_group())
            if self.clip.calibrating:
                outputs["model_output"][SHADOW] = self._bf16_log_probs(data)
        return outputs

    def train_batch(self, stock: Callable, data: TensorDict, loss_function: Callable) -> Any:
        """verl's update under the calibrated bounds; a calibration step adds its tokens to the statistics."""
        config, clip = loss_function.keywords["config"], self.clip
        if self._nominal_low is None:
            self._nominal_low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        # verl's configs are frozen; verl assigns engine.strategy this way, too.
        object.__setattr__(config, "clip_ratio_low", 1 - clip.low)
        object.__setattr__(config, "clip_ratio_high", clip.high - 1)
        if clip.calibrating:
            ratio = self._bf16_log_probs(data).values() - data[SHADOW].values().to(get_device_id())
            data[_RATIO] = torch.nested.nested_tensor_from_jagged(ratio, data[SHADOW].offsets().to(ratio.device))
            loss_function = self._observed(loss_function)
        outputs = stock(data, loss_function)
        outputs["metrics"]["actor/clip_lower_bound"] = [clip.low]
        outputs["metrics"]["actor/clip_upper_bound"] = [clip.high]
        return outputs

    def save_checkpoint(self, stock: Callable, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint and the bounds."""
        stock(local_path, *args, **kwargs)
        self.clip.finish(self.engine.get_data_parallel_group())
        if self.engine.rank == 0:
            (Path(local_path) / _STATE_FILE).write_text(json.dumps(self.clip.state_dict()))

    def load_checkpoint(self, stock: Callable, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Inverse of :meth:`save_checkpoint`; without saved bounds they keep their initial values."""
        saved = Path(local_path) / _STATE_FILE
        state = from_rank_0(json.loads(saved.read_text()) if self.engine.rank == 0 and saved.exists() else None)
        if state is not None:
            self.clip.load_state_dict(state)
        stock(local_path, *args, **kwargs)

    def _bf16_log_probs(self, data: TensorDict) -> torch.Tensor:
        """Log-probabilities of every token under BF16 linear layers, nested ``[sequences, tokens]`` FP32."""
        with bf16_linears(self.engine.module):
            outputs = FSDPEngineWithLMHead.infer_batch(self.engine, data)
        return outputs["model_output"]["log_probs"].to(get_device_id())

    def _observed(self, loss_function: Callable) -> Callable:
        def observe(model_output: dict, data: TensorDict, dp_group: Any = None) -> Any:
            fields = data.select("old_log_probs", "advantages", "response_mask").to_padded_tensor()
            log_prob = no_padding_2_padding(model_output["log_probs"].detach(), data)
            self.clip.statistics.add(
                torch.exp(log_prob - fields["old_log_probs"]),
                torch.exp(no_padding_2_padding(data[_RATIO], data)),
                fields["advantages"],
                fields["response_mask"].bool(),
                1 - self._nominal_low,
            )
            return loss_function(model_output=model_output, data=data, dp_group=dp_group)

        return observe
