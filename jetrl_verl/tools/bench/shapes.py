# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What is multiplied: the linears of four models, as the GEMMs of training and of decoding, and the floor of each.

All are the contract's ``[M, N] = A [M, K] B [N, K]^T``. With T tokens and a weight of [out, in], (M, N, K) is
FProp (T, out, in), DGrad (T, in, out), WGrad (out, in, T). Linears are as vLLM runs them, q/k/v and gate/up fused.

The floor of a call is the longer of two times: the bytes that it must move, operands and scales read once and the
output written once, at the bandwidth measured in the same run; its operations at the dense FP8 rate of the datasheet.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jetrl_verl.reference import BLOCK
from jetrl_verl.tools.bench import BenchError

MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "qwen3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "llama-3.1-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "qwen2.5-7b": {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
    "qwen2.5-32b": {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (55296, 5120), "down": (5120, 27648)},
}
"""Model -> layer -> (out, in)."""

TOKENS = (4096, 8192, 16384, 32768)
DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WHAT = ("fprop", "dgrad", "wgrad", "decode")
OUTPUTS = {"bf16": 2, "fp32": 4, "fp32+=": 8}
"""What a product is written to, and the bytes an element that this moves; ``+=`` reads and writes."""

FP8_RATE = 1979e12
"""Dense FP8 operations per second of an H100 or H200 (SXM), by the datasheet; the clock under load gives less."""


class Problem(NamedTuple):
    """One GEMM.

    Attributes:
        what: of ``WHAT``. model: its name, several joined by ``+`` where they share the shape. layer: of the model.
        out: of ``OUTPUTS``.
    """

    what: str
    model: str
    layer: str
    m: int
    n: int
    k: int
    out: str = "bf16"

    @property
    def name(self) -> str:
        """``fprop qwen3-8b qkv 4096 x 6144 x 4096``."""
        output = "" if self.out == "bf16" else f" {self.out}"
        return f"{self.what} {self.model} {self.layer} {self.m} x {self.n} x {self.k}{output}"

    @property
    def b_block_scaled(self) -> bool:
        """Whether B is a weight in 128x128 blocks; in WGrad both operands have 1x128 groups."""
        return self.what != "wgrad"

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """FP8 data and scales read once, the output written once (read too where it is added to)."""
        groups = -(-self.k // BLOCK)
        scale_rows = self.m + (-(-self.n // BLOCK) if self.b_block_scaled else self.n)
        return (self.m + self.n) * self.k + 4 * scale_rows * groups + self.m * self.n * OUTPUTS[self.out]

    def floor(self, bandwidth: float) -> tuple[float, str]:
        """Microseconds that no kernel beats, and which term sets them, ``bytes`` or ``operations``.

        Args:
            bandwidth: bytes per second, read plus written.
        """
        times = {"bytes": 1e6 * self.bytes / bandwidth, "operations": 1e6 * self.operations / FP8_RATE}
        bound = max(times, key=times.__getitem__)
        return times[bound], bound


def choose(names: Sequence[str], known: Iterable[str], kind: str) -> list[str]:
    """``names``, in the order of ``known``.

    Raises:
        BenchError: a name that is not known, or none at all.
    """
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        named = f"no {kind} {', '.join(map(repr, unknown))}" if unknown else f"no {kind} named"
        raise BenchError(f"{named}; choose from {', '.join(known)}.")
    return [name for name in known if name in names]


def check_rows(counts: Sequence[int]) -> None:
    """Raises ``BenchError``: a count of rows below 1, or none at all."""
    if not counts or any(count < 1 for count in counts):
        raise BenchError("tokens and decode batches are counts of rows; give numbers from 1 on.")


def problems(
    models: Sequence[str], what: Sequence[str], tokens: Sequence[int], batches: Sequence[int]
) -> list[Problem]:
    """Every GEMM of the chosen models, once per shape.

    Args:
        tokens: of FProp, DGrad and WGrad. batches: rows of a decode step.

    Raises:
        BenchError: a model or kind of GEMM that is not known, a count below 1, or no count for a kind.
    """
    shapes: dict[tuple, list[str]] = {}
    for kind in choose(what, WHAT, "kind of GEMM"):
        counts = batches if kind == "decode" else tokens
        check_rows(counts)
        for model in choose(models, MODELS, "model"):
            for layer, (out, into) in MODELS[model].items():
                for rows in counts:
                    m, n, k = {"dgrad": (rows, into, out), "wgrad": (out, into, rows)}.get(kind, (rows, out, into))
                    for output in OUTPUTS if kind == "wgrad" else ("bf16",):
                        shapes.setdefault((kind, layer, m, n, k, output), []).append(model)
    return [Problem(kind, "+".join(names), *rest) for (kind, *rest), names in shapes.items()]


def problem_of(words: str) -> Problem:
    """The problem that ``what/model/layer/rows`` names, e.g. ``fprop/qwen3-8b/gate_up/16384``. A fifth word names the
    output of WGrad: ``bf16``, ``fp32`` or ``fp32+=``.

    Raises:
        BenchError: other than four or five words, or one that is not known.
    """
    try:
        what, model, layer, rows, *out = words.split("/")
        count = int(rows)
        (out,) = out or [""]
    except ValueError:
        raise BenchError(
            f"{words!r} is no shape; write what/model/layer/rows or what/model/layer/rows/output, e.g. "
            "fprop/qwen3-8b/o/16384 or wgrad/qwen3-8b/o/16384/fp32."
        ) from None
    found = problems([model], [what], [count], [count])
    choose([layer], MODELS[model], "layer")
    outputs = {problem.out: problem for problem in found if problem.layer == layer}
    return outputs[choose([out], outputs, "output")[0]] if out else next(iter(outputs.values()))
