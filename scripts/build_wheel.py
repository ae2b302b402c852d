# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Build the wheel with the Hopper kernels in it: one for every Python 3 and, by its glibc, for the Linux it asks for.

    python scripts/build_wheel.py             # dist/jetrl_verl-<version>-py3-none-manylinux_2_<n>_x86_64.whl
    python scripts/build_wheel.py --out DIR

Needs nvcc, g++, the torch that the wheel will meet (or an older one from 2.10 on) and setuptools; no GPU. `pip install
--no-build-isolation .` makes the same, but goes on without nvcc; this stops. setup.py asks :func:`platform_tag` for the
platform.
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
"""Set to ``required``, it makes setup.py stop where the kernels cannot be compiled."""

# First glibc of a distribution whose libstdc++ has the version: GCC 9 came with glibc 2.30 or newer, and so on.
LIBSTDCXX = {(3, 4, 24): (2, 28), (3, 4, 28): (2, 31), (3, 4, 29): (2, 34), (3, 4, 30): (2, 35), (3, 4, 33): (2, 39)}
LEAST = (2, 28)
"""glibc that torch's own wheels ask for."""


def versions(library: bytes, prefix: str) -> set[tuple[int, ...]]:
    """Versions of symbols, ``GLIBC_2.32`` for the prefix ``GLIBC``, that a shared library names."""
    found = re.findall(rf"\0{prefix}_(\d+(?:\.\d+)+)(?=\0)".encode(), library)
    return {tuple(map(int, each.decode().split("."))) for each in found}


def platform_tag(libraries: Iterable[Path]) -> str:
    """``manylinux_2_<n>_<machine>``: the oldest glibc on which these libraries load beside torch.

    Raises:
        ValueError: a library asks for a libstdc++ that this file does not know.
    """
    needed = [LEAST]
    for path in libraries:
        content = path.read_bytes()
        needed += [version[:2] for version in versions(content, "GLIBC")]
        standard = max(versions(content, "GLIBCXX"), default=(3, 4))
        if fitting := [glibc for newest, glibc in LIBSTDCXX.items() if standard <= newest]:
            needed.append(min(fitting))
        else:
            raise ValueError(f"{path.name} asks for GLIBCXX_{'.'.join(map(str, standard))}; add it to build_wheel.py")
    major, minor = max(needed)
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def build(out: Path) -> Path:
    """The wheel in ``out``; exits with a sentence where it cannot be built."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from build_csrc import find_nvcc

    if find_nvcc() is None:
        sys.exit("make wheel: no nvcc is on the PATH or under CUDA_HOME; build where there is one (docs/install.md).")
    # What an earlier build left would get into the wheel.
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
        # On a PYTHONPATH it would pass for an installed package.
        shutil.rmtree(metadata, ignore_errors=True)
    if done.returncode != 0:
        sys.exit("make wheel: the build failed; its last lines say why.")
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
