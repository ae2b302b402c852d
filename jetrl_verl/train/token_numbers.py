# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shared operations in the engine: the model returns numbers of each token, such as its log-probability, not logits."""

from functools import partial
from typing import Any

import torch
from verl.utils import tensordict_utils
from verl.utils import torch_functional as verl_functional

from jetrl_verl import kernels
from jetrl_verl.nn.chunked_logits import KEPT_BYTES
from jetrl_verl.train.features import Feature, logger
from jetrl_verl.train.shared_operations import TokenNumbers, share_operations

_KEY = "token_numbers"
"""Of the model's inputs, and of what verl keeps for its outputs."""

REACHES = (
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._gather_and_unpad_packed",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.compute_entropy_from_logits",
)
"""What this file uses of verl through values; scripts/reach.py watches it."""


class SharedOperations(Feature):
    def install(self, module: torch.nn.Module) -> None:
        counts = share_operations(module, self.options.kv_cache, self.config.jetrl.images)
        if self.engine.rank == 0:
            logger.info("jetrl: shared operations in the actor: %s", counts)

    def prepare_model_inputs(self, stock: Any, micro_batch: Any) -> tuple[dict, dict]:
        """verl's inputs, and what the model shall compute of each token."""
        inputs, output_args = stock(micro_batch)
        output_args[_KEY] = inputs[_KEY] = self._numbers(output_args, micro_batch)
        return inputs, output_args

    def _numbers(self, output_args: dict, micro_batch: Any) -> TokenNumbers:
        """Log-probability of the next token, and what verl asks for."""
        asked = partial(tensordict_utils.get_non_tensor_data, micro_batch)
        following, rows = output_args["input_ids_rmpad_rolled"], None
        entropy = verl_functional.entropy_from_logits
        if asked("use_remove_padding", True):
            temperature = output_args["temperature_rmpad"]
            entropy = self.engine.compute_entropy_from_logits  # compiled if configured, for packed batches alone
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
        return TokenNumbers(("log_probs", *others), rows, compute, 0 if others else KEPT_BYTES)

    def prepare_model_outputs(self, stock: Any, output: Any, output_args: dict, micro_batch: Any, *_: Any, **__: Any):
        """The numbers of a micro-batch.

        Returns:
            ``log_probs``, ``entropy`` and ``sum_pi_squared`` if asked for, each jagged ``[sequences, tokens]`` FP32;
            the entry of a token describes the next one.
        """
        values = dict(zip(output_args[_KEY].names, output.logits, strict=True))
        if tensordict_utils.get_non_tensor_data(micro_batch, "use_remove_padding", True):
            pad = output_args["pad_size"]
            values = {name: self.engine._gather_and_unpad_packed(value, pad) for name, value in values.items()}
        offsets = micro_batch["input_ids"].offsets()
        return {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in values.items()}
