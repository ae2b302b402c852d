# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Start verl as a user would and follow it: files of a run, Hydra words, environment, device, waiting for its end."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from jetrl_verl.tools import ToolError
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.progress import Tracker
from jetrl_verl.tools.provenance import version_of

VERL = (sys.executable, "-m", "verl.trainer.main_ppo")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class RunPaths:
    """Files of one run below its own folder."""

    folder: Path

    log = property(lambda self: self.folder / "run.log")
    metrics = property(lambda self: self.folder / "metrics.jsonl")
    facts = property(lambda self: self.folder / "run.json")
    report = property(lambda self: self.folder / "report.html")
    config = property(lambda self: self.folder / "hydra" / ".hydra" / "config.yaml")
    ray_logs = property(lambda self: self.folder / "ray_logs")

    def operations(self) -> str:
        """``shared`` or ``stock``, what the run's composed config says of ``jetrl.operations``; needs ``config``."""
        # verl's dump is large, and only a run of ours has the node.
        node = yaml.safe_load(self.config.read_text()).get("jetrl")
        return node["operations"] if node else "stock"


def build_environment(paths: RunPaths, device: str) -> dict[str, str]:
    """Environment of the trainer: this process's, verl's metrics file, no network, no telemetry."""
    environment = {
        **os.environ,
        "VERL_FILE_LOGGER_PATH": str(paths.metrics),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        # Before anything else Ray would start a worker for every core. verl's actors have an environment of their own,
        # so none of them is ever used: on 32 cores, with fourteen runs side by side, 448 processes.
        "RAY_prestart_worker_first_driver": "0",
        # Ray ends workers where the memory that it sees is nearly full: that of the whole host, which others use, too.
        # And a virtual machine whose memory grows as it is used shows it a quarter of what there is.
        "RAY_memory_monitor_refresh_ms": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache()),
    }
    environment.pop("RAY_ADDRESS", None)
    if device == "cpu":
        environment |= {
            "VERL_PLATFORM": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # One thread and two take the same 15 s a step on two cores: what the update gains (7.3 -> 6.1 s) the
            # rollout, where vLLM and the agent loop run side by side, loses (4.6 -> 6.4 s). One does not collapse when
            # something else runs, as waiting OpenMP threads do.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
    return environment


def compile_cache() -> Path:
    """Folder that keeps what torch and Triton compile, from run to run.

    By default it is below ``TMPDIR``, which ``ProcessTree`` gives each run anew and removes: every run would compile
    the same kernels again. Entries are named after a hash of what they were compiled from, so runs of several builds
    and runs side by side may share it. Triton's kernels go there too once torch has compiled something.
    """
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"jetrl_compiled_{os.getuid()}"


def precision_word(words: Iterable[str]) -> str | None:
    """The first of a user's overrides that chooses the group ``precision``, or None.

    It would win over the command's own word, and the results would be named after the other precision.
    """
    return next((word for word in words if word.partition("=")[0].lstrip("+~") == "precision"), None)


def quote(value: object) -> str:
    """A value as Hydra's override grammar reads it; paths are quoted, since they may hold ``=`` or spaces."""
    if isinstance(value, Path):
        escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)


def choose_device(device: str) -> str:
    """``cpu`` or ``cuda`` for one of ``DEVICES``.

    Raises:
        ToolError: another word, or ``cuda`` where torch finds no GPU.
    """
    if device not in DEVICES:
        raise ToolError(f"{device!r} is not a device; choose one of {', '.join(DEVICES)}")
    device = detect_device() if device == "auto" else device
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ToolError("no NVIDIA GPU answers; use --device cpu")
    return device


def detect_device() -> str:
    """``cuda`` where an NVIDIA GPU answers and vLLM is not its CPU build, else ``cpu``."""
    if (version_of("vllm") or "").endswith("+cpu") or shutil.which("nvidia-smi") is None:
        return "cpu"
    answer = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return "cuda" if answer.returncode == 0 and answer.stdout.strip() else "cpu"


def watch(
    command: Sequence[str], environment: Mapping[str, str], paths: RunPaths, tracker: Tracker, console: Console
) -> int:
    """Run the trainer, show where it is, leave nothing of it behind but its files in ``paths``; its exit status."""
    with ProcessTree(command, environment, paths.log) as tree:
        lines = [f"[{tracker.seconds:6.1f} s] {tracker.phase}"]
        for _ in tree.follow():
            for line in (*lines, *tracker.update()):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            lines = []
        status = tree.poll()
        if status != 0:
            _keep_ray_logs(tree.temporary, paths.ray_logs)
    tracker.finish()
    return status


def _keep_ray_logs(temporary: Path, destination: Path) -> None:
    """Save the daemons' logs of a failed run before their folder is removed; those of an earlier attempt go."""
    shutil.rmtree(destination, ignore_errors=True)
    for session in (temporary / "ray").glob("session_2*"):
        with suppress(OSError, shutil.Error):  # files vanish while daemons end; the logs are an extra
            shutil.copytree(session / "logs", destination)
