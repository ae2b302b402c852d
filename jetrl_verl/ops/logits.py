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
"""The end of the forward: ``lm_head`` to FP32 logits, temperature, log-softmax to FP32 log-probabilities.

Stock verl and vLLM round logits to BF16 when they leave ``lm_head`` and reduce the softmax in kernels of their own.
Here logits are rounded once, to FP32, and a log-probability once more. Vocabulary entries that may not be sampled carry
minus infinity, or a number so low that its exponential is zero, on both sides and take no part.
"""

import torch
from torch.autograd.function import once_differentiable

from jetrl_verl.ops._operator import operator, require_bf16, require_shape, triton_kernels
from jetrl_verl.ops.reproducible import exp, grid_bits, log, on_grid, sum_of_fractions

_TERM_BITS = 32
"""Binary places of a term of the softmax denominator: sums of up to 2^21 entries are exact."""

_ELEMENTS = 2**17
"""Logits worked on at a time, so that the passes over them stay in the cache."""


def _fake_logits(hidden, weight):
    return hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=torch.float32)


@operator("logits(Tensor hidden, Tensor weight) -> Tensor", fake=_fake_logits)
def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    require_shape("logits", "weight", weight, (weight.shape[0], hidden.shape[-1]))
    if hidden.is_cuda:
        return triton_kernels().logits(hidden, weight)
    bits = grid_bits(hidden.shape[-1])
    return (on_grid(hidden, bits).double() @ on_grid(weight, bits).double().t()).float()


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return _logits(hidden, weight.to(torch.bfloat16))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        hidden, weight = ctx.saved_tensors
        # As stock training multiplies them; the CPU has no fast BF16 product.
        dtype = torch.bfloat16 if gradient.is_cuda else torch.float32
        gradient = gradient.to(dtype)
        dhidden = dweight = None
        if ctx.needs_input_grad[0]:
            dhidden = (gradient @ weight.to(dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            dweight = (rows.t() @ hidden.reshape(-1, hidden.shape[-1]).to(dtype)).to(weight.dtype)
        return dhidden, dweight


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden weight^T``, rounded once; differentiable in both.

    Args:
        hidden: ``[..., K]`` BF16. weight: ``[V, K]``, taken at its BF16 value.

    Returns:
        ``[..., V]`` FP32.

    Raises:
        TypeError: ``hidden`` is not BF16.
    """
    require_bf16("logits", hidden=hidden)
    if torch.is_grad_enabled():
        return _Logits.apply(hidden, weight)
    return _logits(hidden, weight.to(torch.bfloat16))


def _normalised(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maximum and log of the sum of exponentials above it, float64 ``[n, 1]`` each, of ``scaled [n, V]``."""
    highest = scaled.amax(dim=-1, keepdim=True)
    return highest, log(sum_of_fractions(exp(scaled - highest), _TERM_BITS))


def _log_probs_cpu(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    rows, vocabulary = logits.shape
    out = torch.empty(tokens.shape, dtype=torch.float32)
    step = max(1, _ELEMENTS // vocabulary)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        scaled = logits[piece].double().div_(temperature[piece, None].double())
        highest, log_sum = _normalised(scaled)
        out[piece] = (scaled.gather(1, tokens[piece]) - highest - log_sum).float()
    return out


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, tokens, temperature)
        return _log_probs(logits, tokens, temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        logits, tokens, temperature = ctx.saved_tensors
        if logits.is_cuda:
            return triton_kernels().log_probs_backward(gradient, logits, tokens, temperature), None, None
        scaled = gradient / temperature[:, None]
        dlogits = (logits / temperature[:, None]).softmax(dim=-1)
        dlogits.mul_(-scaled.sum(dim=-1, keepdim=True)).scatter_add_(1, tokens, scaled)
        return dlogits, None, None


def _fake_log_probs(logits, tokens, temperature):
    return logits.new_empty(tokens.shape)


@operator("log_probs(Tensor logits, Tensor tokens, Tensor temperature) -> Tensor", fake=_fake_log_probs)
def _log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    require_shape("log_probs", "temperature", temperature, logits.shape[:1])
    require_shape("log_probs", "tokens", tokens, (logits.shape[0], tokens.shape[-1]))
    if logits.is_cuda:
        return triton_kernels().log_probs(logits, tokens, temperature)
    return _log_probs_cpu(logits, tokens, temperature)


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of given tokens; differentiable in ``logits``.

    Args:
        logits: ``[N, V]`` FP32. tokens: ``[N, k]`` int64, tokens asked for in each row.
        temperature: ``[N]`` FP32, positive.

    Returns:
        ``[N, k]`` FP32.

    Raises:
        TypeError: logits or temperatures that are not FP32.
    """
    if logits.dtype != torch.float32 or temperature.dtype != torch.float32:
        raise TypeError(
            f"log_probs: logits are {logits.dtype} and temperatures {temperature.dtype}, expected torch.float32"
        )
    if torch.is_grad_enabled():
        return _LogProbs.apply(logits, tokens, temperature)
    return _log_probs(logits, tokens, temperature)
