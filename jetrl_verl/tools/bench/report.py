# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of the three commands, and the JSON with everything behind them.

A cell is microseconds, the median of single runs, and what part of the floor that is: 100 means as fast as the memory
or the tensor cores allow. Ratios are other / ours, so above 1 we are faster; worst and best shape stand beside each
mean. ``jetrl bench report`` puts the ratios of several files into one table, if one build and one device made them.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.provenance import builds_in, builds_note, describe

TITLES = {
    "fprop": "FProp: us, % of floor",
    "dgrad": "DGrad: us, % of floor",
    "wgrad": "WGrad: us, % of floor",
    "decode": "decode: us, % of floor",
}


class Result(dict):
    """What a command found, as JSON holds it, and the file that it is kept in (None: nowhere).

    Raises:
        BenchError: the file cannot be written, told before anything is measured for it.
    """

    def __init__(self, out: Path | None, found: Mapping):
        super().__init__(found)
        self.out = out
        try:
            if out:
                out.parent.mkdir(parents=True, exist_ok=True)
                fresh = not out.exists()
                out.open("a").close()
                if fresh:
                    out.unlink()
        except OSError as error:
            raise BenchError(f"--out {out} cannot be written ({error.strerror}); name a file.") from None

    def save(self) -> None:
        """Write everything found so far, so that a run that is cut off leaves what it had."""
        if self.out:
            self.out.write_text(json.dumps(self, indent=1) + "\n")

    def check_timed(self) -> None:
        """Raises ``BenchError``: every contender was left out of every shape; a wrong result is another matter."""
        records = [*self["records"], *([self["sustained"]] if "sustained" in self else [])]
        if not self["wrong"] and not any(record["us"] for record in records):
            raise BenchError("nothing was timed, for the reasons above; choose other contenders or shapes.")


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of positive numbers; NaN of none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def ratios(records: Iterable[Mapping], ours: str) -> dict[str, dict]:
    """Other contender -> how many times as long it takes as ``ours``: geometric mean, worst and best.

    A record has ``us``, name -> spread with a ``median``, and a ``layer`` and ``m``, ``n``, ``k`` or an ``operation``.
    """
    found: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        own = record["us"].get(ours)
        for name, spread in record["us"].items():
            if own and name != ours:
                where = " x ".join(str(record[axis]) for axis in "mnk" if axis in record)
                found.setdefault(name, []).append((spread["median"] / own["median"], f"{record['layer']} {where}"))
    return {
        name: {"mean": geometric_mean([ratio for ratio, _ in pairs]), "shapes": len(pairs)}
        | dict(zip(("worst", "at"), min(pairs)))
        | dict(zip(("best", "best_at"), max(pairs)))
        for name, pairs in found.items()
    }


def _cell(record: Mapping, name: str, best: float) -> str:
    spread = record["us"].get(name)
    if spread is None:
        return "-"
    text = f"{spread['median']:.1f} {100 * record['floor_us'] / spread['median']:3.0f}%"
    return f"[bold]{text}[/bold]" if spread["median"] == best else text


def times_table(title: str, records: Sequence[Mapping]) -> Table:
    """One row per shape, one column per contender, the fastest in bold."""
    names = list(dict.fromkeys(name for record in records for name in record["us"]))
    outputs = any(record.get("out", "bf16") != "bf16" for record in records)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    for heading in ("M", "N", "K", *(["out"] if outputs else []), "floor", *names):
        table.add_column(heading, justify="right", no_wrap=True)
    model = None
    for record in records:
        if record["model"] != model:
            model = record["model"]
            table.add_row(f"[italic]{model}[/italic]")
        best = min((spread["median"] for spread in record["us"].values()), default=math.nan)
        bound = "B" if record["bound"] == "bytes" else ""
        cells = [_cell(record, name, best) for name in names]
        shape = [str(record[axis]) for axis in "mnk"] + ([record["out"]] if outputs else [])
        table.add_row(record["layer"], *shape, f"{record['floor_us']:.1f}{bound}", *cells)
    return table


def ratios_table(found: Mapping[str, Mapping[str, Mapping[str, Mapping]]]) -> Table:
    """One row for each kind of product, ours and other of ``found``: mean, worst and best of their ratios."""
    table = Table(title="time of the other / ours", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "ours", "other"):
        table.add_column(heading, no_wrap=True)
    for heading in ("shapes", "geometric mean", "worst", "at", "best", "at"):
        table.add_column(heading, justify="left" if heading == "at" else "right", no_wrap=True)
    for label, by_ours in found.items():
        for ours, by_other in by_ours.items():
            for other, ratio in by_other.items():
                ends = (f"{ratio['worst']:.3f}", ratio["at"], f"{ratio['best']:.3f}", ratio["best_at"])
                table.add_row(label, ours, other, str(ratio["shapes"]), f"{ratio['mean']:.3f}", *ends)
    return table


def summarise_gemm(result: Mapping) -> dict[str, dict]:
    """Kind of GEMM -> ours -> other -> ratio; and by output where WGrad has several."""
    groups: dict[str, list[Mapping]] = {}
    for record in result["records"]:
        label = record["what"] if record["what"] != "wgrad" else f"wgrad {record['out']}"
        groups.setdefault(label, []).append(record)
    return {
        label: {ours: found for ours in ("native", "triton") if (found := ratios(records, ours))}
        for label, records in groups.items()
    }


def _print_bits(records: Sequence[Mapping], console: Console) -> None:
    counts: dict[tuple[str, str], list[int]] = {}
    for record in records:
        for name, references in record["bits"].items():
            for reference, equal in references.items():
                count = counts.setdefault((name, reference), [0, 0])
                count[0] += equal
                count[1] += 1
    for (name, reference), (equal, of) in counts.items():
        console.print(f"bits: {name} equals {reference} at {equal} of {of} shapes", highlight=False)


def _print_errors(records: Sequence[Mapping], console: Console) -> None:
    worst: dict[str, float] = {}
    for record in records:
        for name, error in record["error"].items():
            # A NaN, once seen, stays: no comparison with it is true.
            worst[name] = error if not error <= worst.get(name, 0) else worst.get(name, 0)
    if worst:
        listed = ", ".join(f"{name} {error:.2e}" for name, error in worst.items())
        console.print(f"largest error against float64: {listed}", highlight=False, soft_wrap=True)


def _print_spread(records: Sequence[Mapping], console: Console) -> None:
    widths: dict[str, list[float]] = {}
    for record in records:
        for name, us in record["us"].items():
            widths.setdefault(name, []).append(100 * (us["high"] - us["low"]) / us["median"])
    if widths:
        listed = ", ".join(f"{name} {statistics.median(found):.1f}%" for name, found in widths.items())
        console.print(f"10 to 90% of the runs, median over shapes: {listed}", highlight=False, soft_wrap=True)


def _print_machine(result: Mapping, console: Console) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items() if number)
    console.print(
        f"{result['device']}: copy {result['copy_bandwidth'] / 1e12:.2f} TB/s, two events alone "
        f"{result['event_us']:.1f} us; {versions}; {describe(result.get('build'))}",
        highlight=False,
        soft_wrap=True,
    )
    for name, why in result["absent"].items():
        console.print(f"absent: {name}: {why}", highlight=False, markup=False, soft_wrap=True)
    if result["not_captured"]:
        console.print(f"without a CUDA graph: {', '.join(result['not_captured'])}", highlight=False)
    for wrong in result["wrong"]:
        console.print(f"WRONG {wrong}", highlight=False, markup=False, soft_wrap=True)


def _print_refusals(records: Sequence[Mapping], console: Console) -> None:
    reasons: dict[tuple[str, str], int] = {}
    for record in records:
        for name, why in record["refused"].items():
            reasons[name, why] = reasons.get((name, why), 0) + 1
    for (name, why), count in reasons.items():
        console.print(f"left out of {count}: {name}: {why}", highlight=False, markup=False, soft_wrap=True)


def render_gemm(result: dict, console: Console) -> None:
    """Print what ``jetrl bench gemm`` found; adds the ratios to ``result``."""
    result["summary"] = summarise_gemm(result)
    for what, title in TITLES.items():
        records = [record for record in result["records"] if record["what"] == what]
        if records:
            console.print(times_table(title, records))
    if "sustained" in result:
        record = result["sustained"]
        console.print(times_table(f"sustained, {record['seconds']:g} s each: us, % of floor", [record]))
        for name, after in record["after"].items():
            if after:
                console.print(f"after {name}: {after['mhz']} MHz, {after['watts']:.0f} W", highlight=False)
    console.print(ratios_table(result["summary"]))
    _print_bits(result["records"], console)
    _print_errors(result["records"], console)
    _print_spread(result["records"], console)
    _print_refusals(result["records"], console)
    if "deep_gemm_compile_s" in result:
        console.print(f"DeepGEMM compiled for {result['deep_gemm_compile_s']:.0f} s", highlight=False)
    _print_machine(result, console)


def render_quant(result: Mapping, console: Console) -> None:
    """Print what ``jetrl bench quant`` found, a table per shape and scale rule."""
    for m, k, rule in dict.fromkeys((r["m"], r["k"], r["rule"]) for r in result["records"]):
        title = f"{m} x {k}, rule {rule}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("operation")
        for heading in ("MB", "us", "10 to 90%", "GB/s", "% of copy"):
            table.add_column(heading, justify="right", no_wrap=True)
        for record in result["records"]:
            if (record["m"], record["k"], record["rule"]) == (m, k, rule):
                us = record["us"]
                table.add_row(
                    record["operation"],
                    f"{record['bytes'] / 1e6:.1f}",
                    f"{us['median']:.1f}",
                    f"{us['low']:.1f} - {us['high']:.1f}",
                    f"{record['gb_per_s']:.0f}",
                    f"{100 * record['share_of_copy']:.1f}",
                )
        console.print(table)
    _print_machine(result, console)


def render_linear(result: dict, console: Console) -> None:
    """Print what ``jetrl bench linear`` found; adds the ratios to ``result``."""
    result["summary"] = ratios(result["records"], "jet_fp8")
    names = list(dict.fromkeys(name for record in result["records"] for name in record["us"]))
    title = "forward + backward, weights quantized in each: ms (x BF16), peak MiB"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    for heading in ("M", *names):
        table.add_column(heading, justify="right", no_wrap=True)

    def cells(us: Mapping[str, float], peak: Mapping[str, int | None]) -> list[str]:
        texts = []
        for name in names:
            if name not in us:
                texts.append("-")
                continue
            gain = f" ({us['bf16'] / us[name]:.2f}x)" if "bf16" in us else ""
            memory = f" {peak[name] / 2**20:.0f}" if peak.get(name) is not None else ""
            texts.append(f"{us[name] / 1000:.3f}{gain}{memory}")
        return texts

    for m in dict.fromkeys(record["m"] for record in result["records"]):
        records = [record for record in result["records"] if record["m"] == m]
        for record in records:
            medians = {name: spread["median"] for name, spread in record["us"].items()}
            table.add_row(record["layer"], str(m), *cells(medians, record["peak_bytes"]))
        everywhere = [name for name in names if all(name in record["us"] for record in records)]
        sums = {name: sum(record["us"][name]["median"] for record in records) for name in everywhere}
        table.add_row("[bold]sum[/bold]", str(m), *cells(sums, {}))
    console.print(table)
    console.print(ratios_table({"linear": {"jet_fp8": result["summary"]}}))
    for name in names:
        errors = [record["error"][name] for record in result["records"] if name in record["error"]]
        if errors:
            largest = {key: max(error[key] for error in errors) for key in errors[0]}
            listed = ", ".join(f"{key} {value:.3f}" for key, value in largest.items())
            console.print(f"largest distance from BF16, {name}: {listed}", highlight=False)
    _print_spread(result["records"], console)
    _print_refusals(result["records"], console)
    _print_machine(result, console)


# --- several files ---------------------------------------------------------------------------------------------------

_KEY = ("what", "model", "layer", "m", "n", "k", "out")


def read_results(files: Sequence[Path]) -> dict[Path, dict]:
    """Contents of files that ``jetrl bench gemm`` wrote.

    Raises:
        BenchError: a file is none of them, two hold the same shape, or they are of several devices.
    """
    found: dict[Path, dict] = {}
    origin: dict[tuple, Path] = {}
    for file in files:
        try:
            result = json.loads(file.read_text())
            shapes = [tuple(record[key] for key in _KEY) for record in result["records"]]
        except (OSError, ValueError, KeyError, TypeError):
            raise BenchError(f"{file} is no result of `jetrl bench gemm`. Name a file that its --out wrote.") from None
        for shape in shapes:
            if origin.setdefault(shape, file) != file:
                where = " ".join(map(str, shape))
                raise BenchError(f"{where} is in {origin[shape]} and in {file}. Name one of the two.")
        found[file] = result
    devices = dict.fromkeys(result["device"] for result in found.values())
    if len(devices) > 1:
        raise BenchError(f"the results are of several devices ({', '.join(devices)}). Name those of one.")
    return found


def run_report(files: Sequence[Path], across_builds: bool, console: Console) -> int:
    """Print the ratios of several files of ``jetrl bench gemm`` and which build made them; 1 if one has wrong results.

    Raises:
        BenchError: as :func:`read_results`.
        ToolError: the files are of several builds, and ``across_builds`` is not set.
    """
    results = read_results(files)
    note = builds_note({file.name: builds_in(result) for file, result in results.items()}, across_builds)
    records = [record for result in results.values() for record in result["records"]]
    console.print(ratios_table(summarise_gemm({"records": records})))
    for name in dict.fromkeys(name for record in records for name in record["refused"]):
        if not any(name in record["us"] for record in records):
            console.print(f"never timed: {name}", highlight=False, markup=False)
    for file, result in results.items():
        for name, why in result["absent"].items():
            console.print(f"absent in {file.name}: {name}: {why}", highlight=False, markup=False, soft_wrap=True)
        for wrong in result["wrong"]:
            console.print(f"WRONG in {file.name}: {wrong}", highlight=False, markup=False, soft_wrap=True)
    console.print(note, highlight=False, markup=False, soft_wrap=True)
    return int(any(result["wrong"] for result in results.values()))
