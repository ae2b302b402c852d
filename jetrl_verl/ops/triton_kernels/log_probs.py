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
"""Log-probabilities of given tokens from FP32 logits: maximum and sum of exponentials of a row in one program.

Each lane adds its own columns in ascending order, the lanes are added once at the end. Two reads of a row and no write
but two numbers: the softmax itself never exists. Its gradient makes it again from the two numbers, once, where the
result is written.
"""

import torch
import triton
import triton.language as tl

TILE, WARPS = 4096, 8


@triton.jit(do_not_specialize=["columns", "stride"])
def _normaliser_kernel(logits_ptr, temperature_ptr, highest_ptr, log_sum_ptr, columns, stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    source = logits_ptr + row * stride
    column = tl.arange(0, TILE)
    lanes = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    for start in range(0, columns, TILE):
        x = tl.load(source + start + column, mask=start + column < columns, other=float("-inf"))
        # A comparison with NaN is false either way; addition below carries it on.
        lanes = tl.maximum(lanes, x)
    highest = tl.div_rn(tl.max(lanes, axis=0), temperature)
    sums = tl.zeros((TILE,), dtype=tl.float32)
    for start in range(0, columns, TILE):
        x = tl.load(source + start + column, mask=start + column < columns, other=float("-inf"))
        sums += tl.exp(tl.div_rn(x, temperature) - highest)
    tl.store(highest_ptr + row, highest)
    tl.store(log_sum_ptr + row, tl.log(tl.sum(sums, axis=0)))


@triton.jit(do_not_specialize=["columns", "stride"])
def _gradient_kernel(
    logits_ptr, temperature_ptr, highest_ptr, log_sum_ptr, total_ptr, out_ptr, columns, stride, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    x = tl.load(logits_ptr + row * stride + column, mask=mask, other=float("-inf"))
    scaled = tl.div_rn(x, tl.load(temperature_ptr + row))
    p = tl.exp(scaled - tl.load(highest_ptr + row) - tl.load(log_sum_ptr + row))
    tl.store(out_ptr + row * columns + column, -tl.load(total_ptr + row) * p, mask=mask)


def _normalisers(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest scaled logit and log of the sum of exponentials above it, FP32 ``[N, 1]`` each."""
    rows, columns = logits.shape
    highest, log_sum = (torch.empty((rows, 1), dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        _normaliser_kernel[(rows,)](
            logits, temperature, highest, log_sum, columns, logits.stride(0), TILE=TILE, num_warps=WARPS
        )
    return highest, log_sum


def _whole_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """See :func:`jetrl_verl.ops.log_probs`."""
    logits = _whole_rows(logits)
    highest, log_sum = _normalisers(logits, temperature.contiguous())
    return logits.gather(1, tokens) / temperature[:, None] - highest - log_sum


def log_probs_backward(
    gradient: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Gradient of the logits ``[N, V]`` FP32 from that of the log-probabilities ``[N, k]`` FP32.

    One read and one write of ``N V`` numbers and nothing of that size beside them: with a large vocabulary a step's
    memory peaks here.
    """
    logits = _whole_rows(logits)
    rows, columns = logits.shape
    temperature = temperature.contiguous()
    scaled = gradient / temperature[:, None]
    out = torch.empty((rows, columns), dtype=torch.float32, device=logits.device)
    if rows:
        _gradient_kernel[(rows, triton.cdiv(columns, TILE))](
            logits,
            temperature,
            *_normalisers(logits, temperature),
            scaled.sum(dim=1, keepdim=True),
            out,
            columns,
            logits.stride(0),
            TILE=TILE,
            num_warps=WARPS,
        )
    return out.scatter_add_(1, tokens, scaled)
