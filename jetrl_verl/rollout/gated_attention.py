# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention block whose output is multiplied by the sigmoid of a gate.

The merged projection has, for each head, a query and then its gate. Importing vLLM's class touches the GPU: import this
module after vLLM has loaded such a model.
"""

import torch

from jetrl_verl import kernels
from jetrl_verl.config.support.table import refuse
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.rollout import vllm_compat as vllm
from jetrl_verl.rollout.handoff import ReadByLinear
from jetrl_verl.rollout.qk_norm import SharedHeads

_hybrid = vllm.hybrid_modules()[-1]


class SharedGatedAttention(SharedHeads, ReadByLinear, _hybrid.Qwen3NextAttention):
    """Qwen3.5's. It returns its result; vLLM's own may write into an argument instead."""

    def check(self) -> None:
        super().check()
        if not self.attn_output_gate:
            refuse("operation_replaced_in_vllm", what="an attention without its output gate")

    def before_output(self, out: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor | QuantizedTensor:
        heads = qkv[:, : 2 * self.q_size].unflatten(1, (self.num_heads, 2, -1))
        operands = out.unflatten(1, (self.num_heads, -1)), heads[:, :, 1]
        if self.reader_format is None:
            return kernels.sigmoid_mul(*operands)
        return self.reader_format.sigmoid_mul(*operands, self.reader_rule, with_product=self.keeps_rows)


SHARED: dict[type, type] = {_hybrid.Qwen3NextAttention: SharedGatedAttention}
"""vLLM's class -> its subclass with another forward."""
