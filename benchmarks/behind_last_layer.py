# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What an engine's decode steps do between the last layer and the tokens, lm_head and sampler, kernel by kernel.

For ``decode_on_gpu.py --behind-last-layer``. ``behind_last_layer_on_gpu.py`` times the same parts by themselves.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl.tools.bench.timeline import Share, recorded, shares_of, spans_of

_MARKER_CYCLES = 1000
_LAST_STEPS = 2
"""Steps at the end of a generation that may hold fewer requests."""

console = Console(width=160)


def is_marker(name: str) -> bool:
    """Whether this is the kernel of ``torch.cuda._sleep``, which nothing else launches."""
    return "spin_kernel" in name


def kernels_behind(runner: Any, generate: Callable[[], object], steps: int) -> dict:
    """Of an engine's decode step: the kernels from its logits to its tokens, by name.

    Args:
        runner: vLLM's model runner, either one. generate: makes the engine decode ``steps`` steps and more.

    Returns:
        ``shares``: names, runs and us a step. ``span_us``: from the last layer's end to the last of these kernels'.
        ``layers``: likewise of all kernels in front of them, those of the layers. ``step_us``: from one step's logits
        to the next one's. Medians over steps.
    """
    model, sample = runner.model, "sample" if hasattr(runner, "sample") else "_sample"
    stock_logits, stock_sample = model.compute_logits, getattr(runner, sample)

    def logits(*args: Any, **kwargs: Any) -> Any:
        if open_spans:  # a dummy run computes logits and draws nothing
            return stock_logits(*args, **kwargs)
        open_spans.append(1)
        torch.cuda._sleep(_MARKER_CYCLES)
        return stock_logits(*args, **kwargs)

    def drawn(*args: Any, **kwargs: Any) -> Any:
        found = stock_sample(*args, **kwargs)
        if open_spans:
            torch.cuda._sleep(_MARKER_CYCLES)
            open_spans.clear()
        return found

    open_spans: list[int] = []
    model.compute_logits = logits
    setattr(runner, sample, drawn)
    try:
        found = recorded(generate)
    finally:
        model.compute_logits = stock_logits
        setattr(runner, sample, stock_sample)
    spans = spans_of(found, is_marker)[-steps - _LAST_STEPS : -_LAST_STEPS]
    pairs = list(zip(spans, spans[1:], strict=False))
    layers = [[k for k in found if earlier[-1].end <= k.begin < later[0].begin] for earlier, later in pairs]
    return {
        "shares": [share._asdict() for share in shares_of([span[1:-1] for span in spans])],
        "span_us": statistics.median(span[-1].begin - span[0].end for span in spans),
        "layers": [share._asdict() for share in shares_of(layers)],
        "step_us": statistics.median(later[0].begin - earlier[0].begin for earlier, later in pairs),
    }


def print_shares(title: str, shares: list[Share], total_us: float) -> None:
    """A table of kernels by name."""
    table = Table(title=f"{title}: {total_us:.0f} us", box=SIMPLE_HEAD)
    for heading, justify in (("kernel", "left"), ("runs", "right"), ("us", "right")):
        table.add_column(heading, justify=justify)
    for share in shares:
        name = share.name if len(share.name) <= 110 else share.name[:107] + "..."
        table.add_row(name, f"{share.count:g}", f"{share.us:.1f}")
    console.print(table)
