# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fixed inputs of the probes that operations declare (``operator``) and the contract check runs on both sides.

Cached on each device, 1 MB: copies from the host wait for the device, and no operation writes into its inputs. The
probes compare code; a model's own eps and rotary table are among its constants (sync/constants.py).
"""

from functools import cache
from typing import NamedTuple

import torch

from jetrl_verl.kernels.rotary import rotary_table
from jetrl_verl.reference import BLOCK

LENGTHS = (5, 1, 149)
"""Tokens of the sequences; the last one has two blocks of 128 keys."""


class Variant(NamedTuple):
    """What of a model chooses among variants of the operations.

    Attributes:
        head_dim, rotary_dim: features of an attention head, and its rotated ones.
        unit_offset: whether norms multiply by ``1 + weight``. delta_net: whether it has gated delta nets.
    """

    head_dim: int = 128
    rotary_dim: int = 128
    unit_offset: bool = False
    delta_net: bool = False


PLAIN = Variant()
"""Of most models."""


class ProbeInputs(NamedTuple):
    """Inputs of any model's operations: 155 tokens, hidden size 384, 4 query heads, 2 KV heads, 200 logits."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    head: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    temperature: torch.Tensor
    logits: torch.Tensor
    following: torch.Tensor
    unit_offset: bool

    @property
    def sequences(self) -> tuple:
        """Arguments of attention."""
        return self.q, self.k, self.v, self.cu_seqlens, max(LENGTHS), self.q.shape[-1] ** -0.5


@cache
def probe_inputs(device: torch.device, variant: Variant = PLAIN) -> ProbeInputs:
    """:class:`ProbeInputs` on ``device`` of models of a variant."""
    generator = torch.Generator().manual_seed(20260122)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16)

    tokens = sum(LENGTHS)
    x, residual, weight, head = normal(tokens, 384), normal(tokens, 384), normal(384), normal(200, 384)
    # Not the results of kernels.logits, so that a difference shows in the operation that makes it alone.
    logits = torch.randn(tokens, 200, generator=generator, device="cpu").to(device)
    q, k, v = (normal(tokens, heads, variant.head_dim) for heads in (4, 2, 2))
    return ProbeInputs(
        x,
        residual,
        weight,
        head,
        q,
        k,
        v,
        table=rotary_table(variant.rotary_dim, 2048, {"rope_theta": 1e6}).to(device),
        positions=torch.arange(2047, 2047 - tokens, -1, device=device),
        cu_seqlens=torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32),
        temperature=torch.linspace(0.3, 2, tokens).to(device),
        logits=logits,
        following=torch.arange(tokens, device=device)[:, None],
        unit_offset=variant.unit_offset,
    )


EXPERTS, PER_TOKEN, WIDTH = 6, 3, 128
ROWS = (1, 5, 137)
"""Token counts of the experts' probe; kernels are chosen by their number."""


class MixtureInputs(NamedTuple):
    """Inputs of the operations of a mixture of experts: tied logits, an expert without tokens, and ``terms`` whose sums
    in the rows ``rows`` depend on the order."""

    tied: torch.Tensor
    x: torch.Tensor
    logits: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    terms: torch.Tensor
    rows: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor

    @property
    def normed_sum(self) -> tuple:
        """Arguments of a sum of experts' rows followed by a norm."""
        return self.terms, self.rows, self.residual, self.weight, 1e-6


@cache
def mixture_inputs(device: torch.device) -> MixtureInputs:
    """:class:`MixtureInputs` on ``device``."""
    generator = torch.Generator().manual_seed(20261124)
    tokens, plain = max(ROWS), probe_inputs(device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    # Expert 2 gets no token, expert 0 most of them.
    logits = normal(tokens, EXPERTS)
    logits[:, 0] += 3
    logits[:, 2] -= 100
    # Two terms of a token cancel; the order decides whether the third is lost.
    large = normal(tokens, 2 * BLOCK).mul_(2.0**12)
    terms = torch.stack([large, normal(tokens, 2 * BLOCK), -large], dim=1)
    return MixtureInputs(
        tied=torch.randint(-2, 3, (tokens, 32), generator=generator, device="cpu").float().to(device),
        x=normal(tokens, 2 * BLOCK).to(device, torch.bfloat16),
        logits=logits.to(device),
        gate_up=normal(EXPERTS, 2 * WIDTH, 2 * BLOCK).mul_(0.1).to(device, torch.bfloat16),
        down=normal(EXPERTS, 2 * BLOCK, WIDTH).mul_(0.1).to(device, torch.bfloat16),
        terms=terms.flatten(0, 1).to(device, torch.bfloat16),
        rows=torch.arange(tokens * PER_TOKEN, dtype=torch.int32, device=device).view(tokens, PER_TOKEN),
        residual=plain.residual[:tokens, : 2 * BLOCK].contiguous(),
        weight=plain.weight[: 2 * BLOCK],
    )
