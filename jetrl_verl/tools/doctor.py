# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What this machine can run, and for each thing wrong one line that fixes it: ``jetrl doctor``.

Everything that imports native code (torch, vLLM, Ray, verl) is asked in a process of its own, which runs one of the
``ask_*`` functions below and prints its answer as JSON. So a library that is absent, half installed or crashes on
import costs one finding, never the report, and the answers are those of a fresh process, as a Ray worker or a vLLM
engine is one. What the answers mean is decided here, in plain Python that imports none of them.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
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
from jetrl_verl.config.hopper_kernels import CAPABILITY
from jetrl_verl.config.support.limits import MIN_CAPABILITY, PINS, WGRAD_IN_TRITON
from jetrl_verl.formats.catalog import FLOW, VLLM_METHODS
from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools import bytecode

DISTRIBUTION, ENTRY_POINT = "jetrl-verl", "jetrl"
OK, NOTE, WRONG = "ok", "note", "wrong"

QUANT_METHOD = VLLM_METHODS[FLOW]
"""Name of the flow's quantization method in vLLM."""

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 2 * 2**30
"""One bucket of verl's weight sync (``update_weights_bucket_megabytes``, 2048 by default) where CUDA IPC is missing."""

GPU_FREE_SHARE = 0.5
"""``rollout.gpu_memory_utilization`` of verl's defaults; vLLM refuses to start with less than that free."""

ANSWER_SECONDS = 150.0
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


# --- asked in a process of its own -----------------------------------------------------------------------------------


SHARED = "shared operations"
"""Subject of the finding that they do not run here."""


def ask_kernels() -> dict[str, Any]:
    """What torch sees, and which backend computes each operation: ``{"cuda", "gpus", "devices": {device: ...}, "gap",
    "library"}``: why the shared operations do not run here, and the library of the Hopper kernels."""
    import torch

    from jetrl_verl.config.environment import why_not_shared
    from jetrl_verl.kernels import BACKENDS, describe_backends, platform_of

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        capability = list(torch.cuda.get_device_capability(index))
        name = torch.cuda.get_device_name(index)
        gpus.append({"name": name, "capability": capability, "free": free, "total": total})
    known = sorted({name for platforms in BACKENDS.values() for names in platforms.values() for name in names})
    devices = {}
    for device in [f"cuda:{index}" for index in range(count)] or ["cpu"]:
        try:
            platform = platform_of(torch.device(device))
        except RuntimeError as refusal:
            devices[device] = {"refused": str(refusal)}
            continue
        columns = {name: platforms[platform] for name, platforms in BACKENDS.items() if platform in platforms}
        used = {name for names in columns.values() for name in names}
        devices[device] = {
            "platform": platform,
            "operations": describe_backends(device),
            "last": {operation: names[-1] for operation, names in columns.items()},
            "unavailable": {name: reason for name in sorted(used) if (reason := _why_not(name))},
            "elsewhere": [name for name in known if name not in used],
        }
    facts = {"cuda": torch.version.cuda, "gpus": gpus, "devices": devices, "gap": why_not_shared()}
    return facts | {"library": _library()}


def _library() -> dict[str, Any]:
    """``{"name", "sha256", "error"}`` of the library of csrc/: no sum without one, and why it does not load here. It
    loads without a GPU, too, where torch is a CUDA build."""
    import torch

    from jetrl_verl.kernels import native

    found = {"name": native.library_path().name, "sha256": native.library_sha256(), "error": ""}
    if found["sha256"] is not None and torch.version.cuda is not None:
        try:
            torch.ops.load_library(str(native.library_path()))
            found["error"] = native.mismatch("jetrl_native") or ""
        except OSError as error:
            found["error"] = str(error)
    return found


def _why_not(backend: str) -> str:
    """Why ``backend`` of the dispatch table cannot run in this process; empty if it can."""
    from jetrl_verl.kernels.dispatch import unavailable

    try:
        return unavailable(backend) or ""
    except Exception as error:  # an import of native code may raise anything
        return f"{type(error).__name__}: {error}"


def ask_verl() -> dict[str, Any]:
    """What ``import verl`` made of the plugin: ``{"version", "loaded", "hydra", "reason", "patches"}``."""
    import hydra._internal.hydra
    import verl

    from jetrl_verl.patches import installed_states
    from jetrl_verl.patches.patch import PATCHED, STOCK

    loader = hydra._internal.hydra.ConfigLoaderImpl.__module__
    states = installed_states()
    return {
        "version": verl.__version__,
        "loaded": f"{jetrl_verl.__name__}.plugin" in sys.modules,
        "hydra": loader.startswith(f"{jetrl_verl.__name__}."),
        "reason": _load_error("verl.plugins"),
        "patches": {
            "count": len(states),
            "in_source": sum(state == PATCHED for _, state in states),
            "unfit": [
                {"sentence": patch.mismatch(state), "needed": patch.needed}
                for patch, state in states
                if state not in (STOCK, PATCHED)
            ],
        },
    }


def ask_vllm() -> dict[str, Any]:
    """What vLLM's own plugin loader registers in a process that it starts: ``{"version", "registered", "reason"}``."""
    import vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    registered = QUANT_METHOD in QUANTIZATION_METHODS
    if registered:
        registered = get_quantization_config(QUANT_METHOD).__module__.startswith(f"{jetrl_verl.__name__}.")
    reason = "" if registered else _load_error("vllm.general_plugins")
    return {"version": vllm.__version__, "registered": registered, "reason": reason}


def ask_ray() -> dict[str, Any]:
    """Start a local Ray and ask one worker for the plugin: ``{"version", "complaint"}``."""
    import ray

    from jetrl_verl.config.workers import check_workers

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        check_workers()
    except SystemExit as refusal:
        return {"version": ray.__version__, "complaint": str(refusal).removeprefix("jetrl_verl: ")}
    finally:
        ray.shutdown()
    return {"version": ray.__version__, "complaint": ""}


def _load_error(group: str) -> str:
    """Why our entry point of ``group`` does not load; empty where it loads or there is none."""
    for entry_point in metadata.entry_points(group=group, name=ENTRY_POINT):
        try:
            entry_point.load()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


ASK: dict[str, Callable[[], dict[str, Any]]] = {
    "kernels": ask_kernels,
    "verl": ask_verl,
    "vllm": ask_vllm,
    "ray": ask_ray,
}
_MARK = "jetrl-doctor-answer "


def ask(name: str) -> dict[str, Any]:
    """Run ``ask_<name>`` in a fresh interpreter; ``{"error": one line}`` where it fails, crashes or never answers."""
    command = [sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__, name]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, errors="replace", start_new_session=True, **pipes) as process:
        try:
            output, complaints = process.communicate(timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return {"error": f"no answer within {ANSWER_SECONDS:.0f} s"}
    for line in reversed(output.splitlines()):
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    if process.returncode < 0:
        return {"error": f"the process was ended by {signal.Signals(-process.returncode).name}"}
    lines = [line.strip() for line in (complaints or output).splitlines() if line.strip()]
    return {"error": lines[-1] if lines else f"the process ended with status {process.returncode} and no word"}


def _answer(name: str) -> None:
    try:
        answer = ASK[name]()
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)


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
        price = (
            f": WGrad runs in Triton at {WGRAD_IN_TRITON} of BF16's speed"
            if on_hopper
            else "; no GPU here would run them"
        )
        found = f"{library['name']} is not in this package{price}; `make wheel` makes a wheel that has it, with nvcc"
        return Finding(subject, NOTE, found)
    found = f"{library['name']}, SHA-256 {library['sha256']}"
    if library["error"]:
        fix = "install a wheel of this version, made with the installed torch or an older one (`make wheel`)"
        return Finding(subject, WRONG, f"{found}, does not load: {library['error']}", fix)
    return Finding(subject, OK, found)


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


if __name__ == "__main__":
    _answer(sys.argv[1])
