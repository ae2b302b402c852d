# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compile csrc/ ahead of time into one library that torch.ops.load_library loads: the native Hopper kernels.

    python scripts/build_csrc.py            # jetrl_verl/kernels/libjetrl_sm90.so; nothing to do if it is up to date
    python scripts/build_csrc.py --debug    # libjetrl_sm90_debug.so: waits are bounded and say what they wait for
    python scripts/build_csrc.py --optional # for the package's build: without nvcc or torch a sentence, not a failure
    python scripts/build_csrc.py --csrc ../before/csrc --operators before --target build
                                            # build/libbefore.so, another version next to the installed one

Needs nvcc 12.8 or newer, g++ and the torch that the library will be loaded into (or an older one: the binding uses
torch's stable ABI and no Python). No GPU. Fails if a kernel spills registers or if the compiler serializes wgmma: both
would only show as a slow kernel.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
TARGET = ROOT / "jetrl_verl" / "kernels"
OPERATORS = "jetrl_native"  # torch.ops.<this>
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"  # wgmma and setmaxnreg exist for sm_90a alone
NVCC_FLAGS = ["-std=c++17", "-O3", "-lineinfo", ARCHITECTURE, "-Xcompiler=-fPIC", "-Xptxas=-v,-warn-spills"]
HOST_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-DUSE_CUDA"]
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # torch 2.10


def stop(sentence: str) -> None:
    sys.exit(f"build_csrc: {sentence}")


def find_nvcc() -> str | None:
    """nvcc on the PATH, or under CUDA_HOME."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))


def sources(csrc: Path) -> list[Path]:
    return sorted(csrc.glob("sm90_*.cu"))


def _run(command: list[str | Path]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        stop(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def compile_kernel(nvcc: str, source: Path, folder: Path, debug: bool = False) -> tuple[Path, str]:
    """Object file of one kernel in ``folder`` and what ptxas said about it."""
    output = folder / f"{source.stem}.o"
    flags = [*NVCC_FLAGS, "-DJETRL_DEBUG"] if debug else NVCC_FLAGS
    return output, _run([nvcc, *flags, "-c", source, "-o", output])


def complaints(report: str) -> list[str]:
    """Lines of ptxas' report about spills, stack frames, serialized wgmma and ignored setmaxnreg."""
    bad = re.compile(r"[1-9]\d* bytes (?:stack frame|spill)|serialized|C75\d\d|setmaxnreg ignored")
    return [line.strip() for line in report.splitlines() if bad.search(line)]


def fingerprint(csrc: Path, library: Path, operators: str, debug: bool, nvcc: str, torch_version: str) -> str:
    of_call = (str(library.resolve()), operators, debug, torch_version, NVCC_FLAGS, HOST_FLAGS, STABLE_ABI)
    digest = hashlib.sha256(repr(of_call).encode())
    digest.update(_run([nvcc, "--version"]).encode())
    for path in sorted(csrc.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def build(target: Path, work: Path, *, debug: bool = False, csrc: Path = CSRC, operators: str = OPERATORS) -> Path:
    """Compile the library into ``target``; objects go to ``work``. Exits with a sentence if it cannot be built.

    A debug build prints from the device, which needs a stack frame, so only other builds are checked for none.

    Args:
        csrc, operators: sources of another version, and its name below ``torch.ops``, which is the library's too.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        stop("no nvcc on the PATH or under CUDA_HOME; without it the package uses Triton and vLLM's kernels.")
    try:
        import torch
    except ImportError:
        stop("torch is not installed here, and the library is built against it; use pip's --no-build-isolation.")

    if operators != OPERATORS and "JETRL_OPERATORS" not in (csrc / "binding.cpp").read_text():
        stop(f"{csrc / 'binding.cpp'} does not rename its operators; copy this tree's there if gemm.h is the same.")

    installed = Path(torch.__file__).parent
    name = ("libjetrl_sm90" if operators == OPERATORS else f"lib{operators}") + ("_debug" if debug else "")
    library, stamp = target / f"{name}.so", work / f"{name}.json"
    key = fingerprint(csrc, library, operators, debug, nvcc, torch.__version__)
    if library.exists() and stamp.exists() and json.loads(stamp.read_text())["fingerprint"] == key:
        return library
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    objects = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda source: compile_kernel(nvcc, source, folder, debug), sources(csrc)))
    for source, (output, report) in zip(sources(csrc), compiled):
        (folder / f"{source.stem}.ptxas.txt").write_text(report)
        if not debug and complaints(report):
            stop(f"{source.name}: the compiler made a slow kernel:\n" + "\n".join(complaints(report)[:20]))
        objects.append(output)
    binding = folder / "binding.o"
    compiler = os.environ.get("CXX", "g++")
    flags = [*HOST_FLAGS, STABLE_ABI, f"-DJETRL_OPERATORS={operators}", f"-I{installed / 'include'}"]
    _run([compiler, *flags, "-c", csrc / "binding.cpp", "-o", binding])
    # The process has loaded the CUDA runtime and torch already; the linker needs their names only.
    libraries = ["-cudart", "shared", f"-L{installed / 'lib'}", "-ltorch_cpu", "-ltorch_cuda"]
    _run([nvcc, "-shared", ARCHITECTURE, *objects, binding, *libraries, "-o", library])
    stamp.write_text(json.dumps({"fingerprint": key}) + "\n")
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the native Hopper kernels.")
    parser.add_argument("--debug", action="store_true", help="bounded waits with messages")
    parser.add_argument("--optional", action="store_true", help="succeed with a message if it cannot be built")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the library")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "csrc", help="folder of intermediate files")
    parser.add_argument("--csrc", type=Path, default=CSRC, help="another version's sources")
    parser.add_argument("--operators", default=OPERATORS, help="name below torch.ops, and of the library")
    args = parser.parse_args()
    if (args.csrc.resolve() != CSRC) != (args.operators != OPERATORS):
        parser.error("--csrc and --operators go together: otherwise the other version would replace the installed one.")
    try:
        print(build(args.target, args.work, debug=args.debug, csrc=args.csrc, operators=args.operators))
    except SystemExit as failure:
        if not args.optional:
            raise
        print(f"{failure.code}\nbuild_csrc: continuing without the native kernels.", file=sys.stderr)


if __name__ == "__main__":
    main()
