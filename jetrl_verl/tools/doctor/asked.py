# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Questions of ``jetrl doctor`` that import native code (torch, vLLM, Ray, verl). Each runs in a process of its own and
prints JSON, so that a library that crashes on import costs one finding and not the report."""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import jetrl_verl
from jetrl_verl.formats.catalog import FLOW, VLLM_METHODS
from jetrl_verl.tools.doctor import NOTE, OK, WRONG, Finding

ENTRY_POINT = "jetrl"
REINSTALL = "install it again in this environment: `pip install -e /path/to/jetrl_verl`"

QUANT_METHOD = VLLM_METHODS[FLOW]
"""Name of the flow's quantization method in vLLM."""

ANSWER_SECONDS = 150.0


def ask_kernels() -> dict[str, Any]:
    """GPUs and which backend computes each operation: ``{"cuda", "gpus", "devices": {device: ...}, "gap", "library",
    "slow_launches"}``; ``gap``: why the shared operations do not run here, ``library``: the Hopper kernels."""
    import torch

    from jetrl_verl.config.job import Job
    from jetrl_verl.config.options import JetConfig
    from jetrl_verl.config.workers import answer_here, gpu_complaint
    from jetrl_verl.kernels import OPERATIONS, describe_backends, platform_of
    from jetrl_verl.kernels.device.launch import slow_launches
    from jetrl_verl.kernels.dispatch import backends_on
    from jetrl_verl.tools.doctor.self_check import why_not

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        capability = list(torch.cuda.get_device_capability(index))
        name = torch.cuda.get_device_name(index)
        gpus.append({"name": name, "capability": capability, "free": free, "total": total})
    rows = (operation.backends for operation in OPERATIONS.values())
    known = sorted({name for row in rows for names in row.values() for name in names})
    devices = {}
    for device in [f"cuda:{index}" for index in range(count)] or ["cpu"]:
        try:
            platform = platform_of(torch.device(device))
        except RuntimeError as refusal:
            devices[device] = {"refused": str(refusal)}
            continue
        columns = backends_on(torch.device(device))
        used = {name for names in columns.values() for name in names}
        devices[device] = {
            "platform": platform,
            "operations": describe_backends(device),
            "last": {operation: names[-1] for operation, names in columns.items()},
            "unavailable": {name: reason for name in sorted(used) if (reason := why_not(name))},
            "elsewhere": [name for name in known if name not in used],
        }
    shared = Job(JetConfig("jet_fp8", train=FLOW, rollout=FLOW, operations="shared"))
    gap = gpu_complaint(answer_here(), {"GPU": count}, shared).partition(". Set ")[0]
    facts = {"cuda": torch.version.cuda, "gpus": gpus, "devices": devices, "gap": gap}
    return facts | {"library": _library(), "slow_launches": slow_launches()}


def ask_self_check() -> dict[str, Any]:
    """:func:`jetrl_verl.tools.doctor.self_check.outcomes` on each kind of GPU: ``{device: ...}``."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from jetrl_verl.kernels import platform_of
    from jetrl_verl.tools.doctor.self_check import outcomes

    answer, platforms = {}, set()
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            platform = platform_of(device)
        except RuntimeError:
            continue  # ask_kernels reports it
        if platform not in platforms:
            platforms.add(platform)
            answer[str(device)] = {"platform": platform, "outcomes": outcomes(device)}
    return answer


def _library() -> dict[str, Any]:
    """``{"name", "sha256", "error"}`` of the library of csrc/; a CUDA build of torch loads it without a GPU, too."""
    import torch

    from jetrl_verl.kernels import native

    library = {"name": native.library_path().name, "sha256": native.library_sha256(), "error": ""}
    if library["sha256"] is not None and torch.version.cuda is not None:
        try:
            torch.ops.load_library(str(native.library_path()))
            library["error"] = native.mismatch("jetrl_native") or ""
        except OSError as error:
            library["error"] = str(error)
    return library


def _filtered_out(variable: str) -> Finding | None:
    """A finding if the plugin filter in ``variable``, names with commas, excludes this plugin."""
    names = os.environ.get(variable)
    if names is None or (variable == "VERL_USE_EXTERNAL_PLUGINS" and names.strip().lower() in ("", "auto")):
        return None
    if ENTRY_POINT in [name.strip() for name in names.split(",")]:
        return None
    return Finding(
        variable, WRONG, f"{names!r} leaves this plugin out", f"unset {variable}, or add {ENTRY_POINT} to it"
    )


def _unloadable(subject: str, group: str, variable: str) -> Finding | None:
    """Why nothing loads the plugin by its entry point of ``group``, which the filter in ``variable`` may exclude."""
    if metadata.entry_points(group=group, name=ENTRY_POINT):
        return _filtered_out(variable)
    return Finding(subject, WRONG, f"no entry point in the group {group}", REINSTALL)


def check_verl() -> Iterator[Finding]:
    """Whether ``import verl`` loads the plugin, Hydra then knows ``precision=``, and every patch of ``patches/`` fits
    the installed verl and vLLM."""
    import hydra._internal.hydra
    import verl

    from jetrl_verl.patches import installed_states
    from jetrl_verl.patches.patch import PATCHED, STOCK

    subject, group = "plugin in verl", "verl.plugins"
    loader = hydra._internal.hydra.ConfigLoaderImpl.__module__
    if unloadable := _unloadable(subject, group, "VERL_USE_EXTERNAL_PLUGINS"):
        yield unloadable
    elif f"{jetrl_verl.__name__}.plugin" not in sys.modules:
        reason = _load_error(group) or "verl did not load it and gives no reason"
        yield Finding(subject, WRONG, reason, f"fix that error (verl hides it), or {REINSTALL}")
    elif not loader.startswith(f"{jetrl_verl.__name__}."):
        fix = "import verl before hydra is configured, and remove other plugins that replace Hydra's config loader"
        yield Finding(subject, WRONG, "loaded, but Hydra does not know the group precision", fix)
    else:
        yield Finding(subject, OK, f"loaded by verl {verl.__version__}; Hydra knows precision=")
    states = installed_states()
    unfit = [(patch, state) for patch, state in states if state not in (STOCK, PATCHED)]
    for patch, state in unfit:
        detail, _, fix = patch.mismatch(state).partition(". ")
        yield Finding("patches", WRONG, detail, fix) if patch.needed else Finding("patches", NOTE, detail)
    if not unfit:
        fork = sum(state == PATCHED for _, state in states)
        in_source = f", {fork} of them are in the installed source already" if fork else ""
        yield Finding("patches", OK, f"all {len(states)} fit the installed verl and vLLM{in_source}")


def check_vllm() -> Iterator[Finding]:
    """Whether a process of vLLM knows this package's quantization method."""
    subject, group = "plugin in vLLM", "vllm.general_plugins"
    if unloadable := _unloadable(subject, group, "VLLM_PLUGINS"):
        yield unloadable
        return
    import vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    registered = QUANT_METHOD in QUANTIZATION_METHODS
    if registered and get_quantization_config(QUANT_METHOD).__module__.startswith(f"{jetrl_verl.__name__}."):
        detail = f"quantization={QUANT_METHOD} is registered in the processes of vLLM {vllm.__version__}"
        yield Finding(subject, OK, detail)
    else:
        reason = _load_error(group) or "another plugin has that name"
        detail = f"quantization={QUANT_METHOD} is unknown: {reason}"
        yield Finding(subject, WRONG, detail, f"fix that error, or {REINSTALL}")


def check_ray() -> Iterator[Finding]:
    """Whether a worker of a local Ray has the plugin in this version."""
    import ray

    from jetrl_verl.config.workers import check_workers

    subject = "plugin in Ray workers"
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        check_workers()
        yield Finding(subject, OK, f"{jetrl_verl.__version__}, as here (Ray {ray.__version__})")
    except SystemExit as refusal:
        detail, _, fix = str(refusal).removeprefix("jetrl_verl: ").partition("; ")
        yield Finding(subject, WRONG, detail, fix or REINSTALL)
    finally:
        ray.shutdown()


def _load_error(group: str) -> str:
    """Why this package's entry point of ``group`` does not load; empty if it does or there is none."""
    for entry_point in metadata.entry_points(group=group, name=ENTRY_POINT):
        try:
            entry_point.load()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


ASK: dict[str, Callable[[], dict[str, Any]]] = {
    "kernels": ask_kernels,
    "self_check": ask_self_check,
    "verl": lambda: {"findings": list(check_verl())},
    "vllm": lambda: {"findings": list(check_vllm())},
    "ray": lambda: {"findings": list(check_ray())},
}
_MARK = "jetrl-doctor-answer "


def ask(name: str) -> dict[str, Any]:
    """Run ``ask_<name>`` in a new interpreter; ``{"error": one line}`` if it fails, crashes or times out."""
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
    return {"error": lines[-1] if lines else f"the process ended with status {process.returncode} and no output"}


def _answer(name: str) -> None:
    try:
        answer = ASK[name]()
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    _answer(sys.argv[1])
