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
"""FlashAttention 3 from the vLLM wheel with its matching backward from torch, for packed sequences on a GPU.

``num_splits=1``: one thread block walks all keys of a query, in ascending order, whatever the batch. The rollout calls
the same kernel on its paged cache (rollout/attention.py); for heads of 128 decode, chunked prefill and this call agreed
in every bit on an H200 (docs/LOG.md).
"""

from importlib import import_module

import torch


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[N, H, D]`` BF16 and log-sum-exp ``[H, N]`` FP32; arguments as :func:`ops.attention`.

    Raises:
        RuntimeError: the GPU or the wheel has no FlashAttention 3.
    """
    interface = import_module("vllm.vllm_flash_attn.flash_attn_interface")
    if not interface.is_fa_version_supported(3):
        reason = interface.fa_version_unsupported_reason(3)
        raise RuntimeError(
            f"shared attention needs FlashAttention 3 ({reason}); use precision=jet_fp8 jetrl.operations=stock on "
            "this machine"
        )
    return interface.flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=max_seqlen,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_k=max_seqlen,
        cu_seqlens_k=cu_seqlens,
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
        num_splits=1,
        fa_version=3,
    )


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v by torch's FlashAttention backward."""
    # Without dropout the random state is not read.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out.to(out.dtype).contiguous(),
        q,
        k,
        v,
        out,
        lse.contiguous(),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,
        True,
        unused,
        unused,
        scale=scale,
    )
