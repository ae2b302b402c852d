# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""GPUs of this machine: how many there are, what a run took of their memory, and whether a model goes over so many."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from benchmarks.published_shapes import fields_of

QUERY = "nvidia-smi"


def query(asked: str, of: str = "gpu") -> list[str]:
    """The query of figures of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, or, with ``compute-apps``, of
    the processes there."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={visible}"] if visible else []
    return [QUERY, *chosen, f"--query-{of}={asked}", "--format=csv,noheader,nounits"]


def _ask(asked: str) -> list[str]:
    """A line for each GPU; empty where none answers."""
    if shutil.which(QUERY) is None:
        return []
    answer = subprocess.run(query(asked), capture_output=True, text=True)
    return answer.stdout.split() if answer.returncode == 0 else []


def count_gpus() -> int:
    """GPUs that answer."""
    return len(_ask("index"))


class MemoryPeaks:
    """The largest memory that each GPU had in use while the context was open, by a look each second.

    nvidia-smi sees all of it: the trainer, the rollout, both sides' contexts, and whoever else uses the GPU.

    Args:
        watched: whether to look at all.

    Attributes:
        gib: of each GPU in nvidia-smi's order; None where nobody looked or no GPU answers.
    """

    def __init__(self, watched: bool = True) -> None:
        self.gib: list[float] | None = None
        self._watched = watched and shutil.which(QUERY) is not None
        self._program: subprocess.Popen | None = None

    def __enter__(self) -> "MemoryPeaks":
        if self._watched:
            # What it has said by lines is in the file when it is ended.
            command = ["stdbuf", "--output=L", *query("index,memory.used"), "--loop=1"]
            # A file without a name: a pipe that nobody empties stops the program.
            self._lines = os.fdopen(os.memfd_create("gpu_memory"), "w+")
            self._program = subprocess.Popen(command, stdout=self._lines, stderr=subprocess.DEVNULL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._program is None:
            return
        self._program.terminate()
        self._program.wait()
        with self._lines as lines:
            lines.seek(0)
            self.gib = peaks_of(lines.read().splitlines())


def peaks_of(lines: Sequence[str]) -> list[float] | None:
    """GiB of each GPU, from lines ``index, MiB``; None where there is none. A line that was cut off is left out."""
    peaks: dict[int, float] = {}
    for line in lines:
        with suppress(ValueError):
            gpu, used = line.split(",")
            peaks[int(gpu)] = max(peaks.get(int(gpu), 0.0), float(used) / 1024)
    return [round(peaks[gpu], 2) for gpu in sorted(peaks)] or None


INSTEAD = {"qwen3_moe_3b": "--model qwen3_30b_a3b --layers 4"}
"""Shape whose experts do not go over several ranks -> what does, and is as large."""


def unfit(model: str, gpus: int, tp: int, quantized: bool) -> str:
    """Why a shape of ``PUBLISHED`` does not go over ``gpus`` GPUs with rollouts of ``tp`` of them; empty if it does.

    Args:
        quantized: whether a run quantizes its linear layers, whose shards then are multiples of 128.
    """
    from jetrl_verl.formats.catalog import FLOW
    from jetrl_verl.models.families.base import UnsupportedLayer
    from jetrl_verl.models.plan import plan_linears

    if gpus < 1 or tp < 1 or gpus % tp:
        return f"--tp {tp} is not supported with --gpus {gpus}. Set a --tp that divides --gpus."
    try:
        # BF16 layers go over any ranks that share the heads: so does a shape whose experts are not looked at.
        plan_linears(fields_of(model), tp, format_name=FLOW) if quantized else _deal_heads(model, tp)
    except UnsupportedLayer as problem:
        remedy = INSTEAD.get(model) or f"--tp {problem.largest or 1}"
        return f"--tp {tp} is not supported with {model}: {problem}. Set {remedy}."
    return ""


def _deal_heads(model: str, tp: int) -> None:
    from jetrl_verl.models.families import family
    from jetrl_verl.models.families.base import UnsupportedLayer

    fields = fields_of(model)
    if not family(fields).divides_heads(fields, tp):
        raise UnsupportedLayer(f"its {family(fields).heads_of(fields)} are not divided by {tp}")


def too_few(gpus: int, on_a_cpu: bool) -> str:
    """Why this machine does not run a job over ``gpus`` GPUs; empty if it does."""
    if on_a_cpu or (there := count_gpus()) >= gpus:
        return ""
    return f"--gpus {gpus} is not supported with the {there} GPUs of this machine. Set --gpus {max(there, 1)}."
