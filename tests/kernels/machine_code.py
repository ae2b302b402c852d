# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Machine code of a compiled kernel or library, disassembled by Triton's cuobjdump; needs no GPU."""

import subprocess
from pathlib import Path

import triton


def disassembled(file: Path) -> str:
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([cuobjdump, "-sass", file], capture_output=True, text=True, check=True).stdout
