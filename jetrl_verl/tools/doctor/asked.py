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
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jetrl_verl
from jetrl_verl.formats.catalog import FLOW, VLLM_METHODS

ENTRY_POINT = "jetrl"

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


def ask_verl() -> dict[str, Any]:
    """Whether ``import verl`` loads the plugin: ``{"version", "loaded", "hydra", "reason", "patches"}``."""
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
    """Whether vLLM's plugin loader registers the quantization method: ``{"version", "registered", "reason"}``."""
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
    "verl": ask_verl,
    "vllm": ask_vllm,
    "ray": ask_ray,
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
