# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Findings about this machine from the answers of ``asked.py``, and their report. Imports no native code."""

import json
import os
import shlex
import shutil
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import jetrl_verl
from jetrl_verl.config.environment import is_pinned
from jetrl_verl.config.hopper_kernels import CAPABILITY, IN_TRITON
from jetrl_verl.config.installed import installed_version
from jetrl_verl.config.support.limits import MIN_CAPABILITY, PINS
from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools import bytecode
from jetrl_verl.tools.doctor import NOTE, OK, WRONG, Finding
from jetrl_verl.tools.doctor.asked import ASK, REINSTALL, ask
from jetrl_verl.tools.provenance import nvidia_smi

DISTRIBUTION = "jetrl-verl"

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 2 * 2**30
"""A bucket of verl's weight sync (``update_weights_bucket_megabytes``), which is here without CUDA IPC."""

GPU_FREE_SHARE = 0.5
"""verl's default of ``gpu_memory_utilization``; vLLM does not start with less free."""


_OF_VERL = f"install verl {PINS['verl']} and its pins"
_OF_VLLM = f"install vllm {PINS['vllm']} and its pins; the error names the cause"
_OF_RAY = "fix Ray, or leave it out with --no-ray; `ray stop` ends an earlier run's"

SHARED = "shared operations"
"""Subject of the finding that they do not run here."""


def diagnose(ray: bool = True) -> list[Finding]:
    """Every finding about this machine; ``ray``: start a local Ray (about 20 s) and ask its workers, too."""
    names = [name for name in ASK if ray or name != "ray"]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = dict(zip(names, pool.map(ask, names)))
    drivers = [f"{name}, driver {driver}" for name, driver in nvidia_smi()]
    checks = [
        lambda: check_library(answers["kernels"]),
        lambda: check_packages(),
        lambda: check_gpus(answers["kernels"], drivers),
        lambda: check_kernels(answers["kernels"]),
        lambda: check_self(answers["self_check"], answers["kernels"]),
        lambda: check_installation(),
        lambda: of_process(answers["verl"], "plugin in verl", "import verl", _OF_VERL),
        lambda: of_process(answers["vllm"], "plugin in vLLM", "loading vLLM's plugins", _OF_VLLM),
        lambda: of_process(answers["ray"], "plugin in Ray workers", "a local Ray", _OF_RAY) if ray else (),
        lambda: check_shared_memory(),
        lambda: check_bytecode(),
    ]
    return [finding for check in checks for finding in _run(check)]


def _run(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # the other checks still report
        where = traceback.extract_tb(error.__traceback__)[-1].name
        return [Finding(where, WRONG, f"{type(error).__name__}: {error}", "report this line: the check failed")]


def check_library(kernels: dict[str, Any]) -> Iterator[Finding]:
    """Whether the Hopper kernels are there and load; without them a run is slower, not wrong."""
    library, subject = kernels.get("library"), "Hopper kernels"
    if library is None:
        return  # check_kernels reports the error
    detail = f"{library['name']}, SHA-256 {library['sha256']}"
    if library["sha256"] is None:
        on_hopper = any(tuple(gpu["capability"]) == CAPABILITY for gpu in kernels.get("gpus", []))
        price = f": {IN_TRITON}" if on_hopper else "; no GPU here would run them"
        detail = f"{library['name']} is not in this package{price}; `make wheel` makes a wheel that has it, with nvcc"
        yield Finding(subject, NOTE, detail)
    elif library["error"]:
        fix = "install a wheel of this version, made with the installed torch or an older one (`make wheel`)"
        yield Finding(subject, WRONG, f"{detail}, does not load: {library['error']}", fix)
    else:
        yield Finding(subject, OK, detail)


def check_packages() -> Iterator[Finding]:
    """Installed versions compared with ``PINS``; flash-attn is optional."""
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
        detail = f"not installed; optional: every precision but bf16 then sets {JETRL_ATTENTION}"
    else:
        detail = f"{flash}; verl's flash_attention_2 path is untested with this plugin"
    yield Finding("flash-attn", NOTE, detail)


def check_gpus(kernels: dict[str, Any], drivers: list[str]) -> Iterator[Finding]:
    """GPUs of the driver and of torch: FP8 support, free memory, a C compiler for Triton."""
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
        detail = f"{gpu['name']}, compute capability {capability}, {driver}, CUDA {kernels['cuda']}"
        if tuple(gpu["capability"]) < MIN_CAPABILITY:
            least = ".".join(map(str, MIN_CAPABILITY))
            fix = f"use precision=bf16, or a GPU of compute capability {least} or newer"
            yield Finding(f"GPU {index}", WRONG, f"{detail}: no FP8 tensor cores", fix)
            continue
        yield Finding(f"GPU {index}", OK, detail)
        memory = f"{_gib(gpu['free'])} of {_gib(gpu['total'])} free"
        if gpu["free"] < GPU_FREE_SHARE * gpu["total"]:
            fix = f"end its other processes (`nvidia-smi`), or lower rollout.gpu_memory_utilization ({GPU_FREE_SHARE})"
            yield Finding(f"GPU {index} memory", WRONG, memory, fix)
        else:
            yield Finding(f"GPU {index} memory", OK, memory)
    if gap := kernels.get("gap"):
        refused = "jet_fp8_exact, bf16_shared and jet_fp8 of a mixture are refused"
        yield Finding(SHARED, NOTE, f"{gap}; jet_fp8 of a dense model needs jetrl.operations=stock, {refused}")
    if gpus and not os.environ.get("CC") and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        fix = "install gcc, or set CC to a compiler"
        yield Finding("C compiler", WRONG, "none, and Triton compiles its launchers with one", fix)


def check_kernels(kernels: dict[str, Any]) -> Iterator[Finding]:
    """Which backend computes each operation on each kind of GPU, and why a faster one does not."""
    if "error" in kernels:
        yield Finding("kernels", WRONG, kernels["error"], "fix torch and Triton first: `make setup` installs the pins")
    if (slow := kernels.get("slow_launches")) is not None:
        yield Finding("Triton launches", NOTE if slow else OK, slow or "direct")
    reported = set()
    for device, facts in kernels.get("devices", {}).items():
        if "refused" in facts:
            continue  # check_gpus reports it
        platform, unavailable = facts["platform"], facts["unavailable"]
        if platform in reported:
            continue
        reported.add(platform)
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


def check_self(answer: dict[str, Any], kernels: dict[str, Any]) -> Iterator[Finding]:
    """Whether kernels of linear layers and of mixtures compute small calls with the reference's bits."""
    if "error" in answer:
        if "error" not in kernels:  # else check_kernels reports it
            fix = "free the GPU (`nvidia-smi`), or run `make setup`, which installs the pinned torch, Triton and vLLM"
            yield Finding("self-check", WRONG, answer["error"], fix)
        return
    for device, facts in answer.items():
        backends: dict[tuple[str, str], list[str]] = {}
        names: dict[tuple[str, str], list[str]] = {}
        failed: dict[tuple[str, str], list[str]] = {}
        for subject, name, backend, error in facts["outcomes"]:
            if error:
                failed.setdefault((backend, error), []).append(name)
            else:
                backends.setdefault((subject, name), []).append(backend)
        for (backend, error), calls in failed.items():
            fix = "`make setup` installs the pinned torch, Triton and vLLM"
            if backend == "native":
                fix = "install a wheel of this version (`make wheel`); without the kernels Triton runs"
            yield Finding(f"{backend} on {device}", WRONG, f"{', '.join(calls)}: {error}", fix)
        for (subject, name), equal in backends.items():
            names.setdefault((subject, ", ".join(equal)), []).append(name)
        for (subject, equal), calls in names.items():
            detail = f"{equal}: {', '.join(calls)}: the reference's bits"
            yield Finding(f"{subject}, {facts['platform']}", OK, detail)


def check_installation() -> Iterator[Finding]:
    """Whether the plugin's metadata, by which verl and vLLM load it, is there once, in the imported version."""
    imported = Path(jetrl_verl.__file__).parent
    versions: dict[str, list[str]] = {}
    for distribution in metadata.distributions(name=DISTRIBUTION):
        versions.setdefault(distribution.version, []).append(str(distribution.locate_file("")))
    if not versions:
        yield Finding(DISTRIBUTION, WRONG, f"{imported} is importable but not installed", REINSTALL)
    elif len(versions) > 1:
        listed = "; ".join(f"{version} in {places[0]}" for version, places in versions.items())
        fix = f"`pip uninstall {DISTRIBUTION}` until none is left, then {REINSTALL}"
        yield Finding(DISTRIBUTION, WRONG, f"installed in {len(versions)} versions: {listed}", fix)
    elif jetrl_verl.__version__ not in versions:
        detail = f"{imported} is version {jetrl_verl.__version__}, its metadata says {next(iter(versions))}"
        yield Finding(DISTRIBUTION, WRONG, detail, REINSTALL)
    else:
        yield Finding(DISTRIBUTION, OK, f"{jetrl_verl.__version__} in {imported}")


def of_process(answer: dict[str, Any], subject: str, failed: str, fix: str) -> Iterator[Finding]:
    """What a process of asked.py has found, or that it ``failed``."""
    if "error" in answer:
        yield Finding(subject, WRONG, f"{failed}: {answer['error']}", fix)
    yield from (Finding(*finding) for finding in answer.get("findings", ()))


def check_shared_memory() -> Iterator[Finding]:
    """``/dev/shm``, which NCCL, Ray's object store and a weight sync without CUDA IPC use."""
    subject = str(SHARED_MEMORY)
    fix = "give the container more shared memory: `docker run --shm-size=16g`, or `--ipc=host`"
    if not SHARED_MEMORY.is_dir():
        yield Finding(subject, WRONG, "absent", fix)
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    detail = f"{_gib(usage.free)} of {_gib(usage.total)} free"
    if usage.free < SHARED_MEMORY_BYTES:
        yield Finding(subject, WRONG, f"{detail}, {_gib(SHARED_MEMORY_BYTES)} are needed", fix)
    else:
        yield Finding(subject, OK, detail)


def check_bytecode() -> Iterator[Finding]:
    """Whether the large packages have bytecode; without it every process of a run compiles them."""
    missing = bytecode.folders_without()
    if not missing:
        yield Finding("bytecode", OK, "all large packages have it")
        return
    names, command = ", ".join(sum(missing.values(), [])), bytecode.command_for(missing)
    detail = f"missing of {names}: a run starts a minute or more later; run `{shlex.join(['python3', *command[1:]])}`"
    yield Finding("bytecode", NOTE, detail)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def verdict(findings: Iterable[Finding]) -> str:
    """What this machine runs, in a sentence."""
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
    """The report as JSON: ``{"ok", "verdict", "findings": [{"subject", "state", "detail", "fix"}]}``."""
    ok = all(finding.state != WRONG for finding in findings)
    report = {"ok": ok, "verdict": verdict(findings), "findings": [finding._asdict() for finding in findings]}
    return json.dumps(report, indent=2)


def show(findings: list[Finding], console: Console) -> None:
    """Print a table, the fixes, and the verdict."""
    marks = {OK: "[green]ok[/]", NOTE: "[dim]note[/]", WRONG: "[bold red]wrong[/]"}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(marks[finding.state], escape(finding.subject), escape(finding.detail))
    console.print(table)
    for finding in findings:
        if finding.fix:
            console.print(
                f"\n[bold]{escape(finding.subject)}[/]: {escape(finding.fix)}", soft_wrap=True, highlight=False
            )
    console.print(f"\n{verdict(findings)}", markup=False, highlight=False, soft_wrap=True)


def run_doctor(console: Console, ray: bool, json_only: bool) -> int:
    """Diagnose and report; exit status 1 if something is wrong."""
    findings = diagnose(ray)
    if json_only:
        console.print(as_json(findings), markup=False, highlight=False, soft_wrap=True)
    else:
        show(findings, console)
    return int(any(finding.state == WRONG for finding in findings))
