# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Where the seconds of a step go in one process: what its GPU does, and what it waits for, by name.

    python3 -m benchmarks.steps OUT 3b jet_fp8 --timeline              # one step more than timed, under verl's profiler
    python3 -m benchmarks.timeline OUT/runs/3b-jet_fp8/traces/*.json.gz

Reads traces of torch's profiler in the trainer's processes, from a step's start to the end of its update. Phases are
the outermost ones that verl marks; what lies between two of them has both names. Of each phase:

- ``busy``: seconds in which a kernel or a copy runs; ``NCCL alone``: of these, in which no other than NCCL's runs
- ``idle``: the others, by what a thread that launches kernels does: the innermost operation or call of CUDA, or
  ``Python before`` the next one
- kernels by their seconds, with their number
"""

import argparse
import gzip
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

Span = tuple[float, float]
"""Begin and end in microseconds."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")
SHOWN = 12
"""Lines of a phase's tables."""

console = Console(width=160)


def load(path: Path) -> list[dict]:
    """All events with a duration in a trace, ``.json`` or ``.json.gz``, by their begin, enclosing ones first."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    return sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def span(event: dict) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans that cover the same time, in order. ``spans`` are ordered by their begin."""
    merged: list[Span] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def within(spans: Sequence[Span], window: Span) -> Iterator[Span]:
    """The parts of disjoint, ordered ``spans`` inside of ``window``."""
    for begin, end in spans[max(0, bisect_right(spans, window) - 1) :]:
        if begin >= window[1]:
            return
        if end > window[0]:
            yield max(begin, window[0]), min(end, window[1])


def gaps(spans: Iterable[Span], window: Span) -> Iterator[Span]:
    """What ``spans`` leave of ``window``; they are disjoint, ordered and inside of it."""
    at = window[0]
    for begin, end in spans:
        if begin > at:
            yield at, begin
        at = end
    if at < window[1]:
        yield at, window[1]


def seconds(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans) / 1e6


def phases(events: Sequence[dict]) -> list[tuple[str, Span]]:
    """Name and span of each phase, and of what lies between two, from the first to the last event."""
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    thread = max(marks, key=lambda mark: mark["dur"])["tid"]
    at, last, named = events[0]["ts"], "start", []
    for mark in marks:
        begin, end = span(mark)
        if mark["tid"] == thread and begin >= at:
            named += [(f"{last} to {mark['name']}", (at, begin)), (mark["name"], (begin, end))]
            at, last = end, mark["name"]
    return [*named, (f"{last} to end", (at, max(event["ts"] + event["dur"] for event in events)))]


def innermost(events: Iterable[dict]) -> Iterator[tuple[Span, str]]:
    """A thread's operations and calls of CUDA as disjoint spans in order, each with the innermost one's name."""
    enclosing: list[tuple[float, str]] = []  # end and name, the innermost one last
    at = 0.0
    for begin, end, name in [*((*span(event), event["name"]) for event in events), (math.inf, math.inf, "")]:
        while enclosing and enclosing[-1][0] <= begin:
            ends, ended = enclosing.pop()
            if ends > at:
                yield (at, ends), ended
                at = ends
        if enclosing and begin > at:
            yield (at, begin), enclosing[-1][1]
        at = max(at, begin)
        enclosing.append((end, name))


def host_work(events: Iterable[dict]) -> list[tuple[Span, str]]:
    """Disjoint spans in order, with the names of what threads do that launch kernels. The backward pass has a thread of
    its own, for which the first one waits; where two are at work, the one that began first counts."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_HOST:
            threads[event["tid"]].append(event)
    launching = (thread for thread in threads.values() if any("aunch" in event["name"] for event in thread))
    parts: list[tuple[Span, str]] = []
    for (begin, end), name in sorted(part for thread in launching for part in innermost(thread)):
        begin = max(begin, parts[-1][0][1]) if parts else begin
        if end > begin:
            parts.append(((begin, end), name))
    return parts


def idle_by_name(idle: Iterable[Span], parts: Sequence[tuple[Span, str]]) -> Counter:
    """Seconds of ``idle`` by the host's work then, or before which work its Python runs."""
    begins, by_name = [begin for (begin, _), _ in parts], Counter()
    for begin, end in idle:
        place = max(0, bisect_right(begins, begin) - 1)
        while begin < end:
            if place == len(parts):
                by_name["Python at the end"] += (end - begin) / 1e6
                break
            (part_begin, part_end), name = parts[place]
            if begin < part_begin:
                to = min(part_begin, end)
                by_name[f"Python before {name}"] += (to - begin) / 1e6
                begin = to
            if begin < min(part_end, end):
                by_name[name] += (min(part_end, end) - begin) / 1e6
                begin = min(part_end, end)
            place += 1
    return by_name


def show(path: Path, shown: int) -> None:
    """Print one process's phases."""
    events = load(path)
    on_gpu = [event for event in events if event.get("cat") in ON_GPU]
    parts = host_work(events)
    busy = union(map(span, on_gpu))
    computing = union(span(event) for event in on_gpu if not event["name"].startswith("nccl"))
    console.print(f"\n{path.name}", markup=False)
    for name, window in phases(events):
        working = list(within(busy, window))
        idle, whole = list(gaps(working, window)), seconds([window])
        if whole < 0.001:
            continue
        alone = seconds(working) - seconds(within(computing, window))
        console.print(
            f"{name}: {whole:.3f} s, busy {seconds(working):.3f}, NCCL alone {alone:.3f}, idle {seconds(idle):.3f}",
            markup=False,
        )
        kernels, counts = Counter(), Counter()
        for event in on_gpu:
            if window[0] <= event["ts"] < window[1]:
                kernels[event["name"]] += event["dur"] / 1e6
                counts[event["name"]] += 1
        for kernel, taken in kernels.most_common(shown):
            console.print(f"  {taken:8.3f} s  {counts[kernel]:7} x  {kernel[:110]}", markup=False, highlight=False)
        for reason, taken in idle_by_name(idle, parts).most_common(shown):
            console.print(f"  {taken:8.3f} s  idle: {reason[:110]}", markup=False, highlight=False)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="+")
    parser.add_argument("--shown", type=int, default=SHOWN, help=f"lines of each table, {SHOWN} if not set")
    options = parser.parse_args(words)
    for path in options.trace:
        show(path, options.shown)


if __name__ == "__main__":
    main()
