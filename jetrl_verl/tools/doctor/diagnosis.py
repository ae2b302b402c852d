# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the answers of ``asked.py`` mean, in plain Python that imports no native code, and the report of them."""

import json
import os
import shlex
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import jetrl_verl
from jetrl_verl.config.environment import installed_version, is_pinned
from jetrl_verl.config.hopper_kernels import CAPABILITY, IN_TRITON
from jetrl_verl.config.support.limits import MIN_CAPABILITY, PINS
from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools import bytecode
from jetrl_verl.tools.doctor import MIXTURES
from jetrl_verl.tools.doctor.asked import ASK, ENTRY_POINT, QUANT_METHOD, ask

DISTRIBUTION = "jetrl-verl"
OK, NOTE, WRONG = "ok", "note", "wrong"

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 2 * 2**30
"""One bucket of verl's weight sync (``update_weights_bucket_megabytes``, 2048 by default) where CUDA IPC is missing."""

GPU_FREE_SHARE = 0.5
"""``rollout.gpu_memory_utilization`` of verl's defaults; vLLM refuses to start with less than that free."""

_REINSTALL = "install it again in this environment: `pip install -e /path/to/jetrl_verl`"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at. state: ``ok``, ``note`` (works, worth knowing) or ``wrong``.
        found: what is there. fix: what to do about it; empty unless ``wrong``.
    """

    subject: str
    state: str
    found: str
    fix: str = ""


SHARED = "shared operations"
"""Subject of the finding that they do not run here."""


# --- what it means ---------------------------------------------------------------------------------------------------


def diagnose(ray: bool = True) -> list[Finding]:
    """Every finding about this machine, in the order of the report.

    Args:
        ray: start a local Ray (about 20 seconds on two cores) and ask its workers too.
    """
    names = [name for name in ASK if ray or name != "ray"]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = dict(zip(names, pool.map(ask, names)))
    drivers = nvidia_smi()
    parts = [
        lambda: check_packages(),
        lambda: check_gpus(answers["kernels"], drivers),
        lambda: check_kernels(answers["kernels"]),
        lambda: check_self(answers["self_check"], answers["kernels"]),
        lambda: check_mixtures(answers["kernels"]),
        lambda: check_installation(),
        lambda: check_verl(answers["verl"]),
        lambda: check_patches(answers["verl"]),
        lambda: check_vllm(answers["vllm"]),
        lambda: check_ray(answers["ray"]) if ray else (),
        lambda: check_shared_memory(),
        lambda: check_bytecode(),
    ]
    return [finding for part in parts for finding in _surviving(part)]


def _surviving(part: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(part())
    except Exception as error:  # a doctor who faints helps nobody
        where = traceback.extract_tb(error.__traceback__)[-1].name
        return [Finding(where, WRONG, f"{type(error).__name__}: {error}", "report this line: the check itself failed")]


def nvidia_smi() -> list[str]:
    """One line per GPU that the driver lists, ``<name>, driver <version>``; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if listing.returncode != 0:
        return []
    return [line.strip().replace(", ", ", driver ") for line in listing.stdout.splitlines() if line.strip()]


def check_packages() -> Iterator[Finding]:
    """Installed versions against ``PINS``; flash-attn is optional."""
    for package, pin in PINS.items():
        installed = installed_version(package)
        fix = f"install {package} {pin}; `make setup` makes an environment with every pin"
        if installed is None:
            yield Finding(package, WRONG, f"not installed, {pin} is needed", fix)
        elif is_pinned(package, installed):
            yield Finding(package, OK, f"{installed} (pin {pin})")
        else:
            yield Finding(package, WRONG, f"{installed}, {pin} is needed", fix)
    flash = installed_version("flash-attn")
    if flash is None:
        found = f"not installed; optional: attn_implementation={JETRL_ATTENTION} packs sequences without it"
    else:
        found = f"{flash}; verl's flash_attention_2 path is untested with this plugin"
    yield Finding("flash-attn", NOTE, found)


def check_gpus(kernels: dict[str, Any], drivers: list[str]) -> Iterator[Finding]:
    """GPUs as the driver and torch see them: FP8 support, free memory, a compiler for Triton's launchers."""
    cpu_build = (installed_version("vllm") or "").endswith("+cpu")
    gpus = kernels.get("gpus", [])
    if drivers and cpu_build:
        fix = "run `make setup STACK=gpu`, or hide the GPUs with CUDA_VISIBLE_DEVICES= to use the CPU stack"
        yield Finding("GPU", WRONG, f"{drivers[0]}, but this is the CPU build of vLLM", fix)
    elif drivers and not gpus and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        needs = f"CUDA {kernels['cuda']}" if kernels.get("cuda") else "a CUDA build"
        fix = f"update the driver or the torch build (it needs {needs}), and check CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", WRONG, f"{drivers[0]}, but torch finds no GPU", fix)
    elif not gpus:
        yield Finding("GPU", NOTE, "none; the demo and the tests run on the CPU, training needs one")
    for index, gpu in enumerate(gpus):
        capability = ".".join(map(str, gpu["capability"]))
        driver = drivers[0].partition(", ")[2] if drivers else "driver unknown"
        found = f"{gpu['name']}, compute capability {capability}, {driver}, CUDA {kernels['cuda']}"
        if tuple(gpu["capability"]) < MIN_CAPABILITY:
            least = ".".join(map(str, MIN_CAPABILITY))
            fix = f"use precision=bf16, or a GPU of compute capability {least} or newer"
            yield Finding(f"GPU {index}", WRONG, f"{found}: no FP8 tensor cores", fix)
            continue
        yield Finding(f"GPU {index}", OK, found)
        memory = f"{_gib(gpu['free'])} of {_gib(gpu['total'])} free"
        if gpu["free"] < GPU_FREE_SHARE * gpu["total"]:
            fix = f"end what else runs there (`nvidia-smi`), or lower rollout.gpu_memory_utilization ({GPU_FREE_SHARE})"
            yield Finding(f"GPU {index} memory", WRONG, memory, fix)
        else:
            yield Finding(f"GPU {index} memory", OK, memory)
    if gap := kernels.get("gap"):
        yield Finding(SHARED, NOTE, f"{gap}; jet_fp8 runs stock operations, jet_fp8_exact and bf16_shared are refused")
    if gpus and not os.environ.get("CC") and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        fix = "install gcc, or name a compiler in CC"
        yield Finding("C compiler", WRONG, "none, and Triton compiles its launchers with one", fix)


def check_kernels(kernels: dict[str, Any]) -> Iterator[Finding]:
    """Which backend computes each operation on each kind of GPU here, and why a better one does not."""
    if "error" in kernels:
        yield Finding("kernels", WRONG, kernels["error"], "fix torch and Triton first: `make setup` installs the pins")
    if library := kernels.get("library"):
        yield _of_library(library, any(tuple(gpu["capability"]) == CAPABILITY for gpu in kernels.get("gpus", [])))
    told = set()
    for device, facts in kernels.get("devices", {}).items():
        if "refused" in facts:
            continue  # check_gpus has said so
        platform, unavailable = facts["platform"], facts["unavailable"]
        if platform in told:
            continue
        told.add(platform)
        by_backend: dict[str, list[str]] = {}
        for operation, backends in facts["operations"].items():
            names = [name for name in backends.split(", else ") if name not in unavailable]
            last = facts["last"][operation]
            if last in unavailable:
                fix = f"fix {last}: `make setup` installs the pinned torch and Triton"
                yield Finding(f"{operation} on {device}", WRONG, f"{last}: {unavailable[last]}", fix)
            else:
                by_backend.setdefault(", else ".join(names), []).append(operation)
        for backends, operations in by_backend.items():
            yield Finding(f"kernels, {platform}", OK, f"{backends}: {', '.join(operations)}")
        fallbacks = set(facts["last"].values())
        for name, reason in unavailable.items():
            if name not in fallbacks:
                yield Finding(f"kernels, {platform}", NOTE, f"{name} is not used: {reason}")
        if facts["elsewhere"]:
            yield Finding(f"kernels, {platform}", NOTE, f"{', '.join(facts['elsewhere'])}: not for this device")


def _of_library(library: dict[str, Any], on_hopper: bool) -> Finding:
    """The Hopper kernels: there, of this version, and loadable; without them a run is slower, not wrong."""
    subject = "Hopper kernels"
    if library["sha256"] is None:
        price = f": {IN_TRITON}" if on_hopper else "; no GPU here would run them"
        found = f"{library['name']} is not in this package{price}; `make wheel` makes a wheel that has it, with nvcc"
        return Finding(subject, NOTE, found)
    found = f"{library['name']}, SHA-256 {library['sha256']}"
    if library["error"]:
        fix = "install a wheel of this version, made with the installed torch or an older one (`make wheel`)"
        return Finding(subject, WRONG, f"{found}, does not load: {library['error']}", fix)
    return Finding(subject, OK, found)


def check_self(answer: dict[str, Any], kernels: dict[str, Any]) -> Iterator[Finding]:
    """Whether the kernels of linears and of mixtures of experts answer tiny calls with the reference's bits."""
    if "error" in answer:
        if "error" not in kernels:  # else check_kernels has said so
            fix = "free the GPU (`nvidia-smi`), or run `make setup`, which installs the pinned torch, Triton and vLLM"
            yield Finding("self-check", WRONG, answer["error"], fix)
        return
    for device, facts in answer.items():
        right: dict[tuple[str, str], list[str]] = {}
        wrong: dict[tuple[str, str], list[str]] = {}
        for subject, name, backend, error in facts["outcomes"]:
            if error:
                wrong.setdefault((backend, error), []).append(name)
            else:
                right.setdefault((subject, name), []).append(backend)
        for (backend, error), names in wrong.items():
            remedy = "`make setup` installs the pinned torch, Triton and vLLM"
            if backend == "native":
                remedy = "install a wheel of this version (`make wheel`); without the kernels Triton runs"
            yield Finding(f"{backend} on {device}", WRONG, f"{', '.join(names)}: {error}", remedy)
        by_backends: dict[tuple[str, str], list[str]] = {}
        for (subject, name), backends in right.items():
            by_backends.setdefault((subject, ", ".join(backends)), []).append(name)
        for (subject, backends), names in by_backends.items():
            found = f"{backends}: {', '.join(names)}: the reference's bits"
            yield Finding(f"{subject}, {facts['platform']}", OK, found)


def check_mixtures(kernels: dict[str, Any]) -> Iterator[Finding]:
    """What FP8 training of a mixture asks for beside kernels: operations that are shared."""
    if "error" in kernels:
        return
    if gap := kernels.get("gap"):
        found = f"{gap}; jet_fp8 of a mixture is refused, fp8_rollout and bf16 are not"
        yield Finding(MIXTURES, NOTE, found)
    elif not kernels.get("gpus"):
        found = "on a CPU jet_fp8 trains them with jetrl.operations=shared, as `jetrl demo --policy moe` does"
        yield Finding(MIXTURES, NOTE, found)


def check_installation() -> Iterator[Finding]:
    """The plugin's metadata, which is how verl and vLLM find it: there, once, and in the version that is imported."""
    imported = Path(jetrl_verl.__file__).parent
    versions: dict[str, list[str]] = {}
    for distribution in metadata.distributions(name=DISTRIBUTION):
        versions.setdefault(distribution.version, []).append(str(distribution.locate_file("")))
    if not versions:
        yield Finding(DISTRIBUTION, WRONG, f"{imported} is importable but not installed", _REINSTALL)
    elif len(versions) > 1:
        listed = "; ".join(f"{version} in {places[0]}" for version, places in versions.items())
        fix = f"`pip uninstall {DISTRIBUTION}` until none is left, then {_REINSTALL}"
        yield Finding(DISTRIBUTION, WRONG, f"installed in {len(versions)} versions: {listed}", fix)
    elif jetrl_verl.__version__ not in versions:
        found = f"{imported} is version {jetrl_verl.__version__}, its metadata says {next(iter(versions))}"
        yield Finding(DISTRIBUTION, WRONG, found, _REINSTALL)
    else:
        yield Finding(DISTRIBUTION, OK, f"{jetrl_verl.__version__} in {imported}")


def _filtered_out(variable: str) -> Finding | None:
    """A finding if the plugin filter in ``variable`` (names, comma separated) leaves ours out."""
    names = os.environ.get(variable)
    if names is None or (variable == "VERL_USE_EXTERNAL_PLUGINS" and names.strip().lower() in ("", "auto")):
        return None
    if ENTRY_POINT in [name.strip() for name in names.split(",")]:
        return None
    return Finding(
        variable, WRONG, f"{names!r} leaves this plugin out", f"unset {variable}, or add {ENTRY_POINT} to it"
    )


def _entry_point_missing(group: str) -> bool:
    return not metadata.entry_points(group=group, name=ENTRY_POINT)


def check_verl(answer: dict[str, Any]) -> Iterator[Finding]:
    """Whether ``import verl`` loads the plugin and Hydra then knows ``precision=``."""
    subject = "plugin in verl"
    if "error" in answer:
        yield Finding(subject, WRONG, f"import verl: {answer['error']}", f"install verl {PINS['verl']} and its pins")
    elif blocked := _filtered_out("VERL_USE_EXTERNAL_PLUGINS"):
        yield blocked
    elif _entry_point_missing("verl.plugins"):
        yield Finding(subject, WRONG, "no entry point in the group verl.plugins", _REINSTALL)
    elif not answer["loaded"]:
        reason = answer["reason"] or "verl did not load it and says nothing"
        yield Finding(subject, WRONG, reason, f"fix that error (verl hides it), or {_REINSTALL}")
    elif not answer["hydra"]:
        fix = "import verl before hydra is configured, and remove other plugins that replace Hydra's config loader"
        yield Finding(subject, WRONG, "loaded, but Hydra does not know the group precision", fix)
    else:
        yield Finding(subject, OK, f"loaded by verl {answer['version']}; Hydra knows precision=")


def check_patches(answer: dict[str, Any]) -> Iterator[Finding]:
    """Whether every patch of ``patches/`` fits the installed verl and vLLM."""
    subject = "patches"
    if "error" in answer:
        return  # check_verl says so
    unfit = answer["patches"]["unfit"]
    for entry in unfit:
        found, _, fix = entry["sentence"].partition(". ")
        yield Finding(subject, WRONG if entry["needed"] else NOTE, found, fix if entry["needed"] else "")
    if not unfit:
        fork = answer["patches"]["in_source"]
        there = f", {fork} of them are in the installed source already" if fork else ""
        yield Finding(subject, OK, f"all {answer['patches']['count']} fit the installed verl and vLLM{there}")


def check_vllm(answer: dict[str, Any]) -> Iterator[Finding]:
    """Whether a process that vLLM starts knows our quantization method."""
    subject = "plugin in vLLM"
    if blocked := _filtered_out("VLLM_PLUGINS"):
        yield blocked
    elif _entry_point_missing("vllm.general_plugins"):
        yield Finding(subject, WRONG, "no entry point in the group vllm.general_plugins", _REINSTALL)
    elif "error" in answer:
        found = f"loading vLLM's plugins: {answer['error']}"
        yield Finding(subject, WRONG, found, f"install vllm {PINS['vllm']} and its pins; the error names the culprit")
    elif not answer["registered"]:
        reason = answer["reason"] or "another plugin holds that name"
        found = f"quantization={QUANT_METHOD} is unknown: {reason}"
        yield Finding(subject, WRONG, found, f"fix that error, or {_REINSTALL}")
    else:
        found = f"quantization={QUANT_METHOD} is registered in the processes of vLLM {answer['version']}"
        yield Finding(subject, OK, found)


def check_ray(answer: dict[str, Any]) -> Iterator[Finding]:
    """Whether a worker of a local Ray has the plugin in this version."""
    subject = "plugin in Ray workers"
    if "error" in answer:
        fix = "fix Ray, or leave it out with --no-ray; `ray stop` ends what an earlier run left"
        yield Finding(subject, WRONG, f"a local Ray: {answer['error']}", fix)
    elif answer["complaint"]:
        found, _, fix = answer["complaint"].partition("; ")
        yield Finding(subject, WRONG, found, fix or _REINSTALL)
    else:
        yield Finding(subject, OK, f"{jetrl_verl.__version__}, as here (Ray {answer['version']})")


def check_shared_memory() -> Iterator[Finding]:
    """``/dev/shm``: weight sync without CUDA IPC, NCCL and Ray's object store live there."""
    subject = str(SHARED_MEMORY)
    fix = "give the container more shared memory: `docker run --shm-size=16g`, or `--ipc=host`"
    if not SHARED_MEMORY.is_dir():
        yield Finding(subject, WRONG, "absent", fix)
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{_gib(usage.free)} of {_gib(usage.total)} free"
    if usage.free < SHARED_MEMORY_BYTES:
        yield Finding(subject, WRONG, f"{found}, {_gib(SHARED_MEMORY_BYTES)} are needed", fix)
    else:
        yield Finding(subject, OK, found)


def check_bytecode() -> Iterator[Finding]:
    """What a run's processes import: without bytecode each of them compiles it again."""
    missing = bytecode.folders_without()
    if not missing:
        yield Finding("bytecode", OK, "of all large packages")
        return
    names, command = ", ".join(sum(missing.values(), [])), bytecode.command_for(missing)
    found = f"missing of {names}: a run starts a minute or more later; run `{shlex.join(['python3', *command[1:]])}`"
    yield Finding("bytecode", NOTE, found)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


# --- the report ------------------------------------------------------------------------------------------------------


def verdict(findings: Iterable[Finding]) -> str:
    """One sentence: what this machine runs."""
    findings = list(findings)
    wrong = sum(finding.state == WRONG for finding in findings)
    if wrong:
        return f"{wrong} {'thing' if wrong == 1 else 'things'} to fix before this machine can be relied on."
    gpus = sum(finding.subject.startswith("GPU ") and finding.subject[4:].isdigit() for finding in findings)
    if gpus:
        but = " but jet_fp8_exact and bf16_shared" if any(finding.subject == SHARED for finding in findings) else ""
        return f"This machine runs every precision{but} on {gpus} {'GPU' if gpus == 1 else 'GPUs'}."
    return "This machine runs the demo and the tests on its CPU; training needs a GPU."


def as_json(findings: list[Finding]) -> str:
    """The report for programs: ``{"ok", "verdict", "findings": [{"subject", "state", "found", "fix"}]}``."""
    ok = all(finding.state != WRONG for finding in findings)
    report = {"ok": ok, "verdict": verdict(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(report, indent=2)


def show(findings: list[Finding], console: Console) -> None:
    """The report for people: a table, the remedies below it, the verdict last."""
    marks = {OK: "[green]ok[/]", NOTE: "[dim]note[/]", WRONG: "[bold red]wrong[/]"}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(marks[finding.state], _plain(finding.subject), _plain(finding.found))
    console.print(table)
    for finding in findings:
        if finding.fix:
            console.print(
                f"\n[bold]{_plain(finding.subject)}[/]: {_plain(finding.fix)}", soft_wrap=True, highlight=False
            )
    console.print(f"\n{verdict(findings)}", markup=False, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def run_doctor(console: Console, ray: bool, json_only: bool) -> int:
    """Diagnose, show and return the exit status: 0, or 1 where something is wrong."""
    findings = diagnose(ray)
    if json_only:
        console.print(as_json(findings), markup=False, highlight=False, soft_wrap=True)
    else:
        show(findings, console)
    return int(any(finding.state == WRONG for finding in findings))
