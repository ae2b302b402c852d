# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``make test``: every test that needs no GPU and is not marked ``slow``, in two lanes side by side, since hardly a
test keeps two cores busy. ``make test-gpu``: every test that needs one, in JOBS processes.

    python scripts/run_tests.py [words for pytest]
    JOBS=6 python scripts/run_tests.py --gpu [words for pytest]

Without a GPU, one lane holds what starts Ray or verl's trainer, one process after another, and the recipes, which makes
the two equally long; the other what computes without either. Both run under the widest instructions that the processor
has. What compares floating point most closely (``PROCESSOR``) runs a second time, behind the lane that ends first,
under the narrowest: sums round in another order there, and a test must not rest on one of them. The second lane's
output comes when it has ended, and at the end one summary of all processes: the counts, what failed, and why what was
skipped was skipped. With a path among the words, one pytest runs on that alone.

With a GPU each process takes each JOBS-th test, so that the tests of one file spread over all: most of them wait for a
compiler, an engine's start or the host, and few need more than a tenth of the GPU's memory. A process's output follows
when all have ended; none stops another.
"""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPUTING = (
    "algorithms", "benchmarks", "kernels", "metrics", "models", "nn", "packaging", "reference", "study", "sync",
    "tools/bench", "tools/diff", "train",
)  # fmt: skip
PROCESSOR = (
    "tests/algorithms/test_shadow_on_cpu.py",
    "tests/kernels/test_quotient_on_cpu.py",
    "tests/kernels/test_reproducible_on_cpu.py",
    "tests/kernels/test_shared_operations_on_cpu.py",
    "tests/nn",
    "tests/reference",
    "tests/sync",
    "tests/train/test_exact_trainer_on_cpu.py",
)
"""What runs under the narrowest instructions, too. Nothing of it compiles with Inductor, which cannot do without
vectors (torch 2.11 writes C++ that does not compile under ATEN_CPU_CAPABILITY=default)."""
NARROWEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PYTEST = [sys.executable, "-m", "pytest", "--gpu=never", "--durations=15"]
GPU_JOBS = max(1, min(6, (os.cpu_count() or 1) // 2))
NOTHING_CHOSEN = 5
"""pytest's exit status where the words chose no test."""


def lanes() -> tuple[list[str], list[str]]:
    """Paths and exclusions of the lane that trains and of the one that computes; together every test, once."""
    paths = [f"tests/{name}" for name in COMPUTING]
    return ["tests", *(f"--ignore={path}" for path in paths)], paths


def summary(reports: list[Path]) -> str:
    """Counts of all processes, the tests that failed, and the reasons of what was skipped."""
    counts, failed, skipped = Counter(), [], Counter()
    for report in reports:
        if not report.exists():
            failed.append(f"{report.stem}: ended without a report")
            continue
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag: child.get("message", "") for child in case}
            kind = next((k for k in ("failure", "error", "skipped") if k in kinds), "passed")
            counts[kind] += 1
            if kind in ("failure", "error"):
                failed.append(f"{report.stem}: {case.get('classname')}::{case.get('name')}")
            elif kind == "skipped":
                skipped[kinds[kind]] += 1
    lines = [f"{counts['passed']} passed, {len(failed)} failed, {counts['skipped']} skipped"]
    lines += [f"  failed: {name}" for name in failed]
    lines += [f"  skipped: {count} ({reason})" for reason, count in skipped.items()]
    return "\n".join(lines)


def status_of(returned: set[int]) -> int:
    """0 where every process passed or had nothing to run, but not where all had nothing; 1 where one failed or died."""
    return min(returned) if returned <= {0, NOTHING_CHOSEN} else 1


def run_on_gpu(words: list[str]) -> int:
    """Run the GPU tests in JOBS processes of this machine, print all they say and a summary."""
    start, jobs = time.monotonic(), int(os.environ.get("JOBS", GPU_JOBS))
    command = [*PYTEST, "--gpu=only", *words]
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / f"part_{i}_of_{jobs}" for i in range(1, jobs + 1)]
        processes = []
        for i, name in enumerate(names, 1):
            with name.open("wb") as said:
                part = [*command, f"--part={i}/{jobs}", f"--junitxml={name.with_suffix('.xml')}"]
                processes.append(subprocess.Popen(part, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT))
        try:
            returned = {process.wait() for process in processes}
        finally:
            for process in processes:
                process.kill()
            for name in names:
                print(f"--- {name.name}\n{name.read_text(errors='replace')}", flush=True)
        minutes = (time.monotonic() - start) / 60
        reports = [name.with_suffix(".xml") for name in names]
        print(f"\nmake test-gpu: {summary(reports)}\n  in {minutes:.1f} minutes", flush=True)
    return status_of(returned)


def main(words: list[str]) -> int:
    if "--gpu" in words:
        return run_on_gpu([word for word in words if word != "--gpu"])
    if any((ROOT / word.partition("::")[0]).exists() for word in words if not word.startswith("-")):
        return subprocess.run([*PYTEST, *words], cwd=ROOT).returncode
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        reports = [Path(folder) / f"{name}.xml" for name in ("training", "computing", "narrowest")]
        training, computing, narrow = (
            [*PYTEST, f"--junitxml={report}", *words, *paths]
            for report, paths in zip(reports, (*lanes(), PROCESSOR), strict=True)
        )
        into = {"cwd": ROOT, "stdout": said, "stderr": subprocess.STDOUT}
        # Ray starts its workers at nice 15. The lane that waits for them must not starve.
        nice = ["nice", "-n", "15"]
        first, second, third = subprocess.Popen(training, cwd=ROOT), subprocess.Popen([*nice, *computing], **into), None
        try:
            while first.poll() is None or second.poll() is None or third is None or third.poll() is None:
                if third is None and (first.poll() is not None or second.poll() is not None):
                    third = subprocess.Popen([*nice, *narrow], env={**os.environ, **NARROWEST}, **into)
                time.sleep(0.2)
        finally:
            for process in (first, second, third):
                if process is not None:
                    process.kill()
        said.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(said.read())
        minutes = (time.monotonic() - start) / 60
        print(f"\nmake test: {summary(reports)}\n  in {minutes:.1f} minutes", flush=True)
    return status_of({first.returncode, second.returncode, third.returncode})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
