# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Build the wheel with the Hopper kernels: one for every Python 3, tagged with the glibc it needs.

    python scripts/build_wheel.py             # dist/jetrl_verl-<version>-py3-none-manylinux_2_<n>_x86_64.whl
    python scripts/build_wheel.py --out DIR

Needs nvcc, g++, setuptools and the torch that the wheel will run with (or an older one from 2.10 on); no GPU. `pip
install --no-build-isolation .` builds the same but continues without nvcc; this stops. setup.py uses
:func:`platform_tag`.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = "JETRL_KERNELS"
"""Environment variable; ``required`` makes setup.py stop if the kernels cannot be compiled."""

# First glibc of a distribution whose libstdc++ has the version: GCC 9 came with glibc 2.30 or newer, and so on.
LIBSTDCXX = {(3, 4, 24): (2, 28), (3, 4, 28): (2, 31), (3, 4, 29): (2, 34), (3, 4, 30): (2, 35), (3, 4, 33): (2, 39)}
LEAST = (2, 28)
"""glibc that torch's wheels need."""


def versions(library: bytes, prefix: str) -> set[tuple[int, ...]]:
    """Versions of the symbols with a prefix, such as ``GLIBC_2.32``, that a shared library needs."""
    numbers = re.findall(rf"\0{prefix}_(\d+(?:\.\d+)+)(?=\0)".encode(), library)
    return {tuple(map(int, number.decode().split("."))) for number in numbers}


def platform_tag(libraries: Iterable[Path]) -> str:
    """``manylinux_2_<n>_<machine>``: the oldest glibc with which these libraries and torch load.

    Raises:
        ValueError: a library needs a libstdc++ that this file does not know.
    """
    needed = [LEAST]
    for path in libraries:
        content = path.read_bytes()
        needed += [version[:2] for version in versions(content, "GLIBC")]
        standard = max(versions(content, "GLIBCXX"), default=(3, 4))
        if fitting := [glibc for newest, glibc in LIBSTDCXX.items() if standard <= newest]:
            needed.append(min(fitting))
        else:
            raise ValueError(f"{path.name} needs GLIBCXX_{'.'.join(map(str, standard))}; add it to build_wheel.py")
    major, minor = max(needed)
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def build(out: Path) -> Path:
    """Build the wheel into ``out``; exits with a sentence if it cannot be built."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from build_csrc import find_nvcc

    if find_nvcc() is None:
        sys.exit("make wheel: no nvcc on the PATH or under CUDA_HOME; build where there is one (docs/install.md).")
    # Leftovers of an earlier build would get into the wheel.
    for stale in (ROOT / "build" / "lib", ROOT / "build" / f"bdist.linux-{platform.machine()}"):
        shutil.rmtree(stale, ignore_errors=True)
    metadata = ROOT / "jetrl_verl.egg-info"
    had_metadata = metadata.exists()
    out.mkdir(parents=True, exist_ok=True)
    backend = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", backend, str(out.resolve())],
        cwd=ROOT,
        env={**os.environ, REQUIRED: "required"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if not had_metadata:
        # On a PYTHONPATH it would look like an installed package.
        shutil.rmtree(metadata, ignore_errors=True)
    if done.returncode != 0:
        sys.exit("make wheel: the build failed; see its last lines.")
    return out / done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheel with the Hopper kernels.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    wheel = build(parser.parse_args().out)
    with zipfile.ZipFile(wheel) as files:
        (library,) = [name for name in files.namelist() if name.endswith("libjetrl_sm90.so")]
        print(f"{wheel}\n{Path(library).name}: SHA-256 {sha256(files.read(library)).hexdigest()}")


if __name__ == "__main__":
    main()
