# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which scale rule should be the default: the experiment behind the choice recorded in docs/log.md.

``fp32`` puts a group's maximum exactly on 448; ``pow2`` may round it by 6%, but re-lays activations out for WGrad
without a second rounding. Which weighs more depends on the data, so each row is one kind of data that training really
meets, and each column one of the three GEMMs of a linear layer, as the relative Frobenius error against float64
products of the same BF16 operands. ``Y p99`` is the 99th percentile of the error of single tokens.

    python benchmarks/scale_rule.py            # about a minute on one core
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from jetrl_verl import reference
from jetrl_verl.reference import BLOCK, SCALE_RULES
from jetrl_verl.tools.provenance import provenance

TOKENS, IN_FEATURES, OUT_FEATURES = 512, 1024, 640
METRICS = ("Y", "Y p99", "dX", "dW", "dW relaid")
RESULTS = Path(__file__).parent / "results" / "scale_rule.json"

Draw = Callable[[int, int, torch.Generator], torch.Tensor]


def gaussian(m: int, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(m, k, generator=g)


def student_t3(m: int, k: int, g: torch.Generator) -> torch.Tensor:
    """Heavy tails everywhere: t distribution with 3 degrees of freedom."""
    return torch.randn(m, k, generator=g) / torch.randn(3, m, k, generator=g).square().mean(0).sqrt()


def swiglu(m: int, k: int, g: torch.Generator) -> torch.Tensor:
    """What a down projection reads: silu(gate) * up of correlated Gaussians of unequal channels."""
    channel = torch.randn(k, generator=g).exp()
    gate, up = torch.randn(2, m, k, generator=g)
    return torch.nn.functional.silu(2 * gate) * up * channel


def outlier_channels(m: int, k: int, g: torch.Generator) -> torch.Tensor:
    """A few channels carry values tens of times larger for every token, as in residual streams of trained models."""
    x = torch.randn(m, k, generator=g)
    channels = torch.randperm(k, generator=g)[: k // 256]
    x[:, channels] *= 20 + 60 * torch.rand(channels.numel(), generator=g)
    return x


def dominating_outlier(m: int, k: int, g: torch.Generator) -> torch.Tensor:
    """One element a hundred to a thousand times the rest in every group of 128, magnitude log-uniform."""
    x = torch.randn(m, k // BLOCK, BLOCK, generator=g)
    where = torch.randint(BLOCK, (m, k // BLOCK, 1), generator=g)
    size = 10 ** (2 + torch.rand(where.shape, generator=g))
    sign = torch.randint(2, where.shape, generator=g) * 2.0 - 1
    return x.scatter_(2, where, size * sign).reshape(m, k)


def policy_gradient(m: int, k: int, g: torch.Generator) -> torch.Tensor:
    """Gradients of a policy loss: advantages differ by orders of magnitude between tokens, half the rows are masked."""
    advantage = torch.randn(m, 1, generator=g).mul(1.5).exp() * (torch.rand(m, 1, generator=g) < 0.5)
    return 1e-5 * advantage * student_t3(m, k, g)


CASES: dict[str, tuple[Draw, Draw]] = {
    "Gaussian": (gaussian, gaussian),
    "Student t3": (student_t3, student_t3),
    "SwiGLU": (swiglu, gaussian),
    "outlier channels": (outlier_channels, student_t3),
    "one dominating outlier per group": (dominating_outlier, student_t3),
    "masked rows, uneven advantages": (student_t3, policy_gradient),
}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def errors(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, rule: str) -> dict[str, float]:
    """Relative errors of the three GEMMs of one layer; ``dW`` takes X from BF16 (one rounding), ``dW relaid`` from the
    saved qdata (two roundings), which is what training does."""
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    saved = reference.quantize_1x128(x, rule)
    weight, weight_t = reference.quantize_128x128_and_transpose(w, rule)
    dy_row, dy_t = reference.quantize_1x128_and_128x1(dy, rule)
    y = reference.gemm_nt_float64(saved, weight, b_block_scaled=True)
    dx = reference.gemm_nt_float64(dy_row, weight_t, b_block_scaled=True)
    dw = reference.gemm_nt_float64(dy_t, reference.quantize_128x1(x, rule), b_block_scaled=False)
    dw_relaid = reference.gemm_nt_float64(dy_t, reference.relayout_128x1(saved, rule), b_block_scaled=False)
    want_y, want_dw = x64 @ w64.t(), dy64.t() @ x64
    per_token = (y - want_y).norm(dim=1) / want_y.norm(dim=1)
    return {
        "Y": relative(y, want_y),
        "Y p99": per_token.quantile(0.99).item(),
        "dX": relative(dx, dy64 @ w64),
        "dW": relative(dw, want_dw),
        "dW relaid": relative(dw_relaid, want_dw),
    }


def run(seeds: int) -> list[dict]:
    """One record per case and rule: mean and spread (largest minus smallest) over seeds of every metric."""
    records = []
    for case, (draw_x, draw_dy) in CASES.items():
        for rule in SCALE_RULES:
            samples = []
            for seed in range(seeds):
                g = torch.Generator().manual_seed(seed)
                x = draw_x(TOKENS, IN_FEATURES, g).bfloat16()
                w = (student_t3(OUT_FEATURES, IN_FEATURES, g) / math.sqrt(IN_FEATURES)).bfloat16()
                dy = draw_dy(TOKENS, OUT_FEATURES, g).bfloat16()
                samples.append(errors(x, w, dy, rule))
            columns = {m: [sample[m] for sample in samples] for m in METRICS}
            records.append(
                {
                    "case": case,
                    "rule": rule,
                    "mean": {m: sum(v) / len(v) for m, v in columns.items()},
                    "spread": {m: max(v) - min(v) for m, v in columns.items()},
                }
            )
    return records


def table(records: list[dict]) -> Table:
    out = Table(title="relative error in % of the exact product of BF16 operands (fp32 / pow2)")
    out.add_column("data")
    for metric in METRICS:
        out.add_column(metric, justify="right")
    for case in CASES:
        by_rule = {r["rule"]: r["mean"] for r in records if r["case"] == case}
        cells = [f"{100 * by_rule['fp32'][m]:.2f} / {100 * by_rule['pow2'][m]:.2f}" for m in METRICS]
        out.add_row(case, *cells)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="independent draws per case")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    args = parser.parse_args()
    records = run(args.seeds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    shape = {"tokens": TOKENS, "in_features": IN_FEATURES, "out_features": OUT_FEATURES, "seeds": args.seeds}
    args.out.write_text(json.dumps({"build": provenance(), "shape": shape, "records": records}, indent=1) + "\n")
    Console().print(table(records))


if __name__ == "__main__":
    main()
