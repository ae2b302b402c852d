# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl bench``: GEMMs, quantizers and the linear layer on one GPU, each beside what else is installed there.

``shapes`` says what is computed and how fast it could be, ``data`` draws operands, ``timing`` takes the time of several
contenders in turns, ``machine`` is the GPU with its measured bandwidth. ``gemm``, ``quant`` and ``linear`` are the
three commands, ``report`` their tables. A figure is only as good as what it was measured beside, so contenders never
run one after the other but in rounds, and a command that sees a wrong result ends with status 1.
"""

from collections.abc import Mapping, Sequence

from jetrl_verl.tools import ToolError


class BenchError(ToolError):
    """The benchmark cannot run; the message is one sentence for the user."""


def check_present(names: Sequence[str], absent: Mapping[str, str]) -> None:
    """Raises ``BenchError``: no contender is left; ``absent`` tells why of each that was chosen."""
    if not names:
        why = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise BenchError(f"no contender can run here ({why}); choose others.")


def reason_of(error: Exception) -> str:
    """What another package raised, in one line."""
    lines = str(error).splitlines() or [""]
    return f"raises {type(error).__name__}: {lines[0]}"[:200]
