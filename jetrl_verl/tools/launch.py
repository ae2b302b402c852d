# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Start verl as a user would and follow it: files of a run, Hydra words, environment, device, waiting for its end."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from jetrl_verl.config.installed import installed_version
from jetrl_verl.config.job import Job
from jetrl_verl.inputs import UserError, reading
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.progress import Tracker

VERL = (sys.executable, "-m", "verl.trainer.main_ppo")
DEVICES = ("auto", "cpu", "cuda")

say = partial(print, flush=True)
"""Show the user a line of a command that takes minutes."""


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

    def job(self) -> dict[str, str]:
        """What the run's composed config resolved to, for reports."""
        with reading(self.config, "composed configuration of a run", "Delete the folder and run again"):
            node = yaml.safe_load(self.config.read_text(encoding="utf-8")).get("jetrl")
        return Job.of(node).facts() if node else {"precision": "bf16"}


def compose(words: Sequence[str], checked: bool = True) -> DictConfig:
    """verl's configuration with a user's overrides, interpolations resolved as verl does.

    ``checked``: refuse what a precision does not support. ``UserError`` if Hydra or a check refuses an override.
    """
    import verl.trainer.config  # noqa: F401  brings the group `precision` into Hydra
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from jetrl_verl.config.hydra_plugin import unchecked

    try:
        with (
            initialize_config_module("verl.trainer.config", version_base=None),
            nullcontext() if checked else unchecked(),
        ):
            config = compose("ppo_trainer", list(words))
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"verl does not accept these overrides: {str(error).rstrip('.')}. Correct them.") from None
    return config


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
        # verl's actors have an environment of their own, so the worker that Ray starts for every core is never used.
        "RAY_prestart_worker_first_driver": "0",
        # Ray would end workers when the host's memory is nearly full, which others use too.
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
            # As fast as two threads on two cores, and not slowed by waiting OpenMP threads when something else runs.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
    return environment


def compile_cache() -> Path:
    """Folder that keeps what torch and Triton compile from run to run; the default is below ``TMPDIR``, which
    ``ProcessTree`` removes."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"jetrl_compiled_{os.getuid()}"


def precision_word(words: Iterable[str]) -> str | None:
    """The first of a user's overrides that sets the group ``precision`` and would replace the command's, or None."""
    return next((word for word in words if word.partition("=")[0].lstrip("+~") == "precision"), None)


def quote(value: object) -> str:
    """A value in Hydra's override grammar; paths are quoted."""
    if isinstance(value, Path):
        escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)


def choose_device(device: str) -> str:
    """``cpu`` or ``cuda`` for one of ``DEVICES``.

    Raises:
        UserError: another word, or ``cuda`` where torch finds no GPU.
    """
    if device not in DEVICES:
        raise UserError(f"{device!r} is not a device. Choose one of {', '.join(DEVICES)}.")
    device = detect_device() if device == "auto" else device
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("no NVIDIA GPU answers. Set --device cpu.")
    return device


def detect_device() -> str:
    """``cuda`` where an NVIDIA GPU answers and vLLM is not its CPU build, else ``cpu``."""
    if (installed_version("vllm") or "").endswith("+cpu") or shutil.which("nvidia-smi") is None:
        return "cpu"
    answer = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return "cuda" if answer.returncode == 0 and answer.stdout.strip() else "cpu"


def watch(command: Sequence[str], environment: Mapping[str, str], paths: RunPaths, tracker: Tracker) -> int:
    """Run the trainer, show where it is, leave nothing of it behind but its files in ``paths``; its exit status."""
    with ProcessTree(command, environment, paths.log) as tree:
        lines = [f"[{tracker.seconds:6.1f} s] {tracker.phase}"]
        for _ in tree.follow():
            for line in (*lines, *tracker.update()):
                say(line)
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
