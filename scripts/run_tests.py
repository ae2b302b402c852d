# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests for the Makefile: pytest processes from one queue, their outputs, and one summary at the end.

    python scripts/run_tests.py [words for pytest]          make test: quick tests, CPU_PROCESSES at a time
    python scripts/run_tests.py --e2e [words for pytest]    make test-e2e: jobs of verl and vLLM, one after another
    python scripts/run_tests.py --vllm [words for pytest]   make test-vllm: these jobs, and tests of what vLLM runs
    python scripts/run_tests.py --all [words for pytest]    make test-all: both, what is marked slow, NARROWEST
    JOBS=6 python scripts/run_tests.py --gpu [words]        make test-gpu: every JOBS-th test in each of JOBS processes

Each process takes one group of folders, so that the memory of one group is free before the next. With a path among the
words, one pytest runs that path alone, whatever its mark.
"""

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
GROUPS = (("kernels",), ("config", "checkpoint", "faults", "patches", "recipes"), ("rollout",), ("train",), ("tools",))
"""Folders of tests/ that run in one process each, longest first; the last process has all other tests."""
OF_VLLM = (("rollout",), ("sync", "patches"))
"""Folders of tests/ about what runs in vLLM: its layers, the weight sync with its contract check, and the patches."""
LONG_JOBS = tuple(f"tests/e2e/test_{name}_on_cpu.py" for name in ("async", "hybrid", "options"))
"""Half of the time of the end-to-end jobs; ``make test-vllm`` runs them beside the others."""
PROCESSOR = (
    "tests/kernels/test_delta_net_on_cpu.py",
    "tests/kernels/test_quotient_on_cpu.py",
    "tests/kernels/test_shared_operations_on_cpu.py",
    "tests/nn",
    "tests/reference",
    "tests/sync",
    "tests/train/test_exact_trainer_on_cpu.py",
    "tests/train/test_shadow_on_cpu.py",
)
"""What compares floating point most closely. ``make test-all`` runs it under the narrowest instructions, too: sums
round in another order there. None of it compiles with Inductor, which needs vectors (torch 2.11)."""
NARROWEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PYTEST = [sys.executable, "-m", "pytest", "--durations=15"]
CPU_PROCESSES = 3
"""One more than two cores: tests also wait, for Ray, for a compiler, for each other."""
GPU_PROCESSES = max(1, min(6, (os.cpu_count() or 1) // 2))
NOTHING_CHOSEN = 5
"""pytest's exit status where the words chose no test."""


@dataclass
class Process:
    """One pytest; ``minutes`` and ``gigabytes`` (the peak of it or of a child it waited for) are known at its end."""

    name: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen | None = None
    minutes: float = 0.0
    gigabytes: float = 0.0

    def start(self, folder: Path, is_alone: bool) -> None:
        """Run pytest; its output goes to a file, or to the terminal if ``is_alone``."""
        self.report, self.output = folder / f"{self.name}.xml", folder / f"{self.name}.txt"
        command = [*PYTEST, f"--junitxml={self.report}", *self.words]
        environment = {**os.environ, **self.environment}
        print(f"--- {self.name}: started", flush=True)
        self._began = time.monotonic()
        with self.output.open("wb") as file:
            into = None if is_alone else file
            self.popen = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=into, stderr=into)

    def ended(self) -> bool:
        """Whether it has ended; reaped here, since ``Popen`` does not say what a process used."""
        if self.popen.returncode is None:
            pid, status, used = os.wait4(self.popen.pid, os.WNOHANG)
            if pid:
                self.popen.returncode = os.waitstatus_to_exitcode(status)
                self.minutes = (time.monotonic() - self._began) / 60
                self.gigabytes = used.ru_maxrss / 2**20  # KiB on Linux
        return self.popen.returncode is not None

    def __str__(self) -> str:
        return f"{self.name}: {self.minutes:.1f} minutes, {self.gigabytes:.1f} GB"


def processes(mode: str, words: list[str]) -> list[Process]:
    """The queue of a mode: ``quick``, ``e2e``, ``vllm``, ``all`` or ``gpu``; every test of the mode, once."""
    if mode == "gpu":
        jobs = int(os.environ.get("JOBS", GPU_PROCESSES))
        return [
            Process(f"part_{i}_of_{jobs}", ["--gpu=only", f"--part={i}/{jobs}", *words]) for i in range(1, jobs + 1)
        ]
    words = ["--gpu=never", *words]
    jobs = Process("e2e", ["--tests=slow-e2e" if mode == "all" else "--tests=e2e", *words, "tests"])
    if mode == "e2e":
        return [jobs]
    tests = [f"--tests={'no-e2e' if mode == 'all' else 'quick'}", *words]
    if mode == "vllm":
        groups = (Process("_".join(group), [*tests, *(f"tests/{folder}" for folder in group)]) for group in OF_VLLM)
        long_jobs = Process("long_e2e", ["--tests=e2e", *words, *LONG_JOBS])
        jobs.words += [f"--ignore={path}" for path in LONG_JOBS]
        return [long_jobs, jobs, *groups]
    taken = [folder for group in GROUPS for folder in group]
    queue = [Process("_".join(group), [*tests, *(f"tests/{folder}" for folder in group)]) for group in GROUPS]
    queue.append(Process("others", [*tests, "tests", *(f"--ignore=tests/{folder}" for folder in taken)]))
    if mode == "all":
        queue += [Process("narrowest", [*tests, *PROCESSOR], NARROWEST), jobs]
    return queue


def run(queue: list[Process], at_once: int, folder: Path) -> None:
    """Run all, ``at_once`` at a time; print the output of each when it ends. None stops another."""
    waiting, running = list(queue), []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.pop(0))
                running[-1].start(folder, len(queue) == 1)
            for process in [process for process in running if process.ended()]:
                running.remove(process)
                print(f"--- {process}\n{process.output.read_text(errors='replace')}", flush=True)
            time.sleep(0.2)
    finally:
        for process in running:
            process.popen.kill()
            print(f"--- {process.name}, killed\n{process.output.read_text(errors='replace')}", flush=True)


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


def main(words: list[str]) -> int:
    mode = next((mode for mode in ("e2e", "vllm", "all", "gpu") if f"--{mode}" in words), "quick")
    words = [word for word in words if word != f"--{mode}"]
    if any((ROOT / word.partition("::")[0]).exists() for word in words if not word.startswith("-")):
        gpu = "only" if mode == "gpu" else "never"
        return subprocess.run([*PYTEST, f"--gpu={gpu}", "--tests=all", *words], cwd=ROOT).returncode
    began, queue = time.monotonic(), processes(mode, words)
    with tempfile.TemporaryDirectory() as folder:
        run(queue, len(queue) if mode == "gpu" else CPU_PROCESSES, Path(folder))
        target = "make test" if mode == "quick" else f"make test-{mode}"
        print(f"\n{target}: {summary([process.report for process in queue])}", *queue, sep="\n  ")
        print(f"  in {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    return status_of({process.popen.returncode for process in queue})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
