# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``make test``: every test that needs no GPU and is not marked ``slow``, in two lanes side by side, since hardly a
test keeps two cores busy. ``make test-gpu``: every test that needs one, in JOBS processes.

    python scripts/run_tests.py [words for pytest]
    JOBS=6 python scripts/run_tests.py --gpu [words for pytest]

Without a GPU, one lane is one process: what starts Ray or verl's trainer, one after another. The other lane has the
tests that compute without either, a process for each of ``PARTS`` in turn, so that what one part keeps in memory is
gone before the next. Where the first lane ends early, it takes the next part, too: both end together on any machine.
All of it runs under the widest instructions that the processor has. What compares floating point most closely
(``PROCESSOR``) runs a second time, as the last part, under the narrowest: sums round in another order there, and a test
must not rest on one of them. What a part printed comes when all have ended, and then one summary: the counts, what
failed, why what was skipped was skipped, and of each process the minutes and the most memory that it or a process it
waited for had. With a path among the words, one pytest runs on that alone.

With a GPU each process takes each JOBS-th test, so that the tests of one file spread over all: most of them wait for a
compiler, an engine's start or the host, and few need more than a tenth of the GPU's memory. A process's output follows
when all have ended; none stops another.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "kernels": ("kernels",),
    "train": ("train",),
    "diff": ("tools/diff",),
    "others": (
        "algorithms", "benchmarks", "metrics", "models", "nn", "packaging", "reference", "sync",
    ),
}  # fmt: skip
"""What computes without Ray and verl's trainer, folders of tests/; the longest part, the kernels, comes first."""
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
LANES = 2
GPU_JOBS = max(1, min(6, (os.cpu_count() or 1) // 2))
NOTHING_CHOSEN = 5
"""pytest's exit status where the words chose no test."""


@dataclass
class Process:
    """One pytest of ``make test``; ``minutes`` and ``gigabytes`` (the most memory) are known once it has ended."""

    name: str
    paths: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen | None = None
    minutes: float = 0.0
    gigabytes: float = 0.0

    def start(self, words: list[str], report: Path, said: Path | None) -> None:
        """Run with words for pytest; what it prints goes to the file ``said``, or comes at once."""
        # Ray starts its workers at nice 15. The process that waits for them must not starve.
        nice = ["nice", "-n", "15"] if said is not None else []
        command = [*nice, *PYTEST, f"--junitxml={report}", *words, *self.paths]
        self._began = time.monotonic()
        with said.open("wb") if said is not None else contextlib.nullcontext() as file:
            into = {} if file is None else {"stdout": file, "stderr": subprocess.STDOUT}
            self.popen = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **self.environment}, **into)

    def ended(self) -> bool:
        """Whether it has ended; reaped here, since ``Popen`` does not tell what a process used."""
        if self.popen.returncode is None:
            pid, status, used = os.wait4(self.popen.pid, os.WNOHANG)
            if pid:
                self.popen.returncode = os.waitstatus_to_exitcode(status)
                self.minutes = (time.monotonic() - self._began) / 60
                self.gigabytes = used.ru_maxrss / 2**20  # KiB on Linux
        return self.popen.returncode is not None

    def __str__(self) -> str:
        return f"{self.name}: {self.minutes:.1f} minutes, {self.gigabytes:.1f} GB"


def processes() -> tuple[Process, list[Process]]:
    """What trains, and what computes in the order of its starts; together every test, once, and PROCESSOR again."""
    folders = {name: [f"tests/{folder}" for folder in part] for name, part in PARTS.items()}
    elsewhere = [f"--ignore={path}" for paths in folders.values() for path in paths]
    computing = [Process(f"computing {name}", paths) for name, paths in folders.items()]
    return Process("training", ["tests", *elsewhere]), [*computing, Process("narrowest", [*PROCESSOR], NARROWEST)]


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
    start, (training, parts) = time.monotonic(), processes()
    every = [training, *parts]
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{process.name}.xml" for process in every]
        said = [report.with_suffix(".txt") for report in reports]
        training.start(words, reports[0], None)
        running, waiting = [training], list(zip(parts, reports[1:], said[1:], strict=True))
        try:
            while running:
                while waiting and len(running) < LANES:
                    part, report, file = waiting.pop(0)
                    part.start(words, report, file)
                    running.append(part)
                for process in [process for process in running if process.ended()]:
                    running.remove(process)
                    print(f"\n[{process}]", flush=True)
                time.sleep(0.2)
        finally:
            for process in running:
                process.popen.kill()
            for process, file in zip(every, said, strict=True):
                if file.exists():
                    print(f"--- {process.name}\n{file.read_text(errors='replace')}", flush=True)
        minutes = (time.monotonic() - start) / 60
        print(f"\nmake test: {summary(reports)}", *every, f"in {minutes:.1f} minutes", sep="\n  ", flush=True)
    return status_of({process.popen.returncode for process in every})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
