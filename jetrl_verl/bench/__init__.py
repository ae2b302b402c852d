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
"""``jetrl bench``: GEMMs, quantisers and the linear layer on one GPU, each beside what else is installed there.

``shapes`` says what is computed and how fast it could be, ``data`` draws operands, ``timing`` takes the time of several
contenders in turns, ``machine`` is the GPU with its measured bandwidth. ``gemm``, ``quant`` and ``linear`` are the
three commands, ``report`` their tables. A figure is only as good as what it was measured beside, so contenders never
run one after the other but in rounds, and a command that sees a wrong result ends with status 1.
"""

from collections.abc import Mapping, Sequence


class BenchError(Exception):
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
