# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""BF16 shadow forwards of an FP8 actor: where calibrated clipping gets the ratio that BF16 would have seen.

The ratio needs two forwards of the same tokens, at the weights of pi_old and at those of pi_theta. verl's engine has a
place for each. ``infer_batch`` runs once a step on the whole batch, before any update: on a calibration step it
runs a second time with BF16 linears, and its log-probabilities leave with the others as the field ``shadow_log_probs``,
which verl carries with each sequence to the update, through balancing and shuffling. ``train_batch`` runs once a
mini-batch: there the second BF16 forward runs right before the update, and the tokens' FP8 ratios are read off the
training forward as it passes through the loss function. So nothing is computed twice in FP8, and off the calibration
steps nothing is computed at all.

A BF16 forward is the FP8 model with its quantized layers turned back into the stock ones for its duration, on the same
parameters: the very layers that precision=bf16 would train.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from jetrl_verl.algorithms.calibrated_clipping import CalibratedClip
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear

SHADOW = "shadow_log_probs"
"""Field of a batch: log-probabilities of the BF16 forward at pi_old, nested as verl's ``log_probs``."""

_RATIO = "shadow_log_ratio"
_STATE_FILE = "calibrated_clip.json"


def from_rank_0(value: Any) -> Any:
    """Rank 0's ``value`` on every rank: its files may lie on no other rank's machine. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def bf16_linears(model: nn.Module) -> Iterator[None]:
    """Inside the block every quantized layer of ``model`` is the stock one it replaced; run forwards under autocast.

    Do not leave the block between a forward and its backward.
    """
    layers = [(module, type(module)) for module in model.modules() if isinstance(module, JetLinear | JetExperts)]
    for layer, _ in layers:
        layer.drop_qdata()
        layer.__class__ = layer.stock_class
    try:
        yield
    finally:
        for layer, ours in layers:
            layer.__class__ = ours
            # A gather inside the block replaced the weight without dropping the qdata.
            layer.drop_qdata()


class ShadowForwards:
    """Calibrated clipping in verl's FSDP engine: mix in front of the engine's class and set ``calibrated_clip``.

    While it is set, ``train_batch`` writes its bounds into ``clip_ratio_low`` and ``clip_ratio_high`` of the actor
    config that the loss function carries, so any loss that reads verl's clip bounds is calibrated.
    """

    calibrated_clip: CalibratedClip | None = None
    _nominal_low: float | None = None

    def infer_batch(self, data: TensorDict, loss_function: Callable | None = None) -> Any:
        """verl's inference; on a calibration step its output also has the BF16 policy's log-probabilities."""
        outputs = super().infer_batch(data, loss_function)
        clip = self.calibrated_clip
        if clip is None or loss_function is not None:
            return outputs
        clip.start_step(get_device_id(), self.get_data_parallel_group())
        if clip.calibrating:
            outputs["model_output"][SHADOW] = self._bf16_log_probs(data)
        return outputs

    def train_batch(self, data: TensorDict, loss_function: Callable) -> Any:
        """verl's update under the calibrated bounds; on a calibration step its tokens enter the statistics."""
        clip = self.calibrated_clip
        if clip is None:
            return super().train_batch(data, loss_function)
        config = loss_function.keywords["config"]
        if self._nominal_low is None:
            self._nominal_low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        # verl freezes its configs against users; it assigns engine.strategy this way itself.
        object.__setattr__(config, "clip_ratio_low", 1 - clip.low)
        object.__setattr__(config, "clip_ratio_high", clip.high - 1)
        if clip.calibrating:
            ratio = self._bf16_log_probs(data).values() - data[SHADOW].values().to(get_device_id())
            data[_RATIO] = torch.nested.nested_tensor_from_jagged(ratio, data[SHADOW].offsets().to(ratio.device))
            loss_function = self._observed(loss_function)
        outputs = super().train_batch(data, loss_function)
        outputs["metrics"]["actor/clip_lower_bound"] = [clip.low]
        outputs["metrics"]["actor/clip_upper_bound"] = [clip.high]
        return outputs

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint, with the bounds beside it."""
        super().save_checkpoint(local_path, *args, **kwargs)
        if self.calibrated_clip is not None:
            self.calibrated_clip.finish(self.get_data_parallel_group())
            if self.rank == 0:
                (Path(local_path) / _STATE_FILE).write_text(json.dumps(self.calibrated_clip.state_dict()))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Inverse of :meth:`save_checkpoint`; a checkpoint without bounds leaves them at their start."""
        if self.calibrated_clip is not None and local_path is not None:
            saved = Path(local_path) / _STATE_FILE
            state = from_rank_0(json.loads(saved.read_text()) if self.rank == 0 and saved.exists() else None)
            if state is not None:
                self.calibrated_clip.load_state_dict(state)
        super().load_checkpoint(local_path, *args, **kwargs)

    def _bf16_log_probs(self, data: TensorDict) -> torch.Tensor:
        """Log-probabilities of every token of ``data`` under BF16 linears, nested ``[sequences, tokens]`` FP32."""
        with bf16_linears(self.module):
            return super().infer_batch(data)["model_output"]["log_probs"].to(get_device_id())

    def _observed(self, loss_function: Callable) -> Callable:
        def observe(model_output: dict, data: TensorDict, dp_group: Any = None) -> Any:
            fields = data.select("old_log_probs", "advantages", "response_mask").to_padded_tensor()
            log_prob = no_padding_2_padding(model_output["log_probs"].detach(), data)
            self.calibrated_clip.statistics.add(
                torch.exp(log_prob - fields["old_log_probs"]),
                torch.exp(no_padding_2_padding(data[_RATIO], data)),
                fields["advantages"],
                fields["response_mask"].bool(),
                1 - self._nominal_low,
            )
            return loss_function(model_output=model_output, data=data, dp_group=dp_group)

        return observe
