# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels of a chain, from made-up runs."""

import pytest

from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.bench.timeline import Kernel, Share, Step, shares_of, spans_of, steps_of


def chain(periods: int) -> list[Kernel]:
    """A quantizer of 2 us, 1 us behind the GEMM in front; a GEMM of 10 us that begins under its last half."""
    found = []
    for start in range(0, 12 * periods, 12):
        found += [Kernel("quantize", start, start + 2), Kernel("gemm", start + 1, start + 11)]
    return found


def test_a_kernel_that_begins_under_another_adds_less_than_it_takes():
    assert steps_of(chain(4), 2) == [Step("quantize", 2, 1, 3), Step("gemm", 10, -1, 9)]


def test_the_steps_of_a_period_add_up_to_it():
    assert sum(step.adds for step in steps_of(chain(4), 2)) == 12


def test_the_first_period_has_nothing_in_front_of_it():
    first = [Kernel("quantize", -40.0, -38.0), Kernel("gemm", -39.0, -5.0)]
    assert steps_of(first + chain(3), 2)[1] == Step("gemm", 10, -1, 9)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (chain(1), "2 kernels are not two or more whole periods of 2"),
        (chain(3)[:-1], "5 kernels are not"),
        ([*chain(3), Kernel("copy", 50, 51), Kernel("gemm", 51, 52)], "at place 0 of 2: copy, quantize"),
    ],
)
def test_what_is_not_a_period_is_refused(kernels, message):
    with pytest.raises(BenchError, match=message):
        steps_of(kernels, 2)


def marked(*names: str) -> list[Kernel]:
    """Kernels of 3 us each, one behind the other."""
    return [Kernel(name, 3 * place, 3 * place + 3) for place, name in enumerate(names)]


def test_spans_run_from_marker_to_marker():
    found = spans_of(marked("layer", "m", "head", "draw", "m", "layer", "m", "head", "m"), lambda name: name == "m")
    assert [[kernel.name for kernel in span] for span in found] == [["m", "head", "draw", "m"], ["m", "head", "m"]]


@pytest.mark.parametrize("names", ["ab", "amb", "mambm"])
def test_a_span_without_an_end_is_refused(names):
    with pytest.raises(BenchError, match="do not make spans"):
        spans_of(marked(*names), lambda name: name == "m")


def test_shares_are_medians_over_spans_of_what_a_name_takes():
    spans = [marked(*names) for names in ("hdd", "hdd", "hd")]
    assert shares_of(spans) == [Share("h", 1, 3), Share("d", 2, 6)]
