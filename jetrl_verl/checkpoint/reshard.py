# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rewrites an FSDP2 checkpoint of N ranks for M ranks: weights, moments and schedule.

verl writes three files per rank (``model``, ``optim``, ``extra_state``) and names them after the number of ranks. FSDP2
shards each tensor along dimension 0 as ``torch.chunk`` does. So a new rank's file is an old one whose DTensors have
other rows and a mesh of M ranks; everything else must be equal on all ranks, which is checked.

- **Files.** Both sets fit in one folder, since names contain the number of ranks. Old files are never touched; new ones
  are renamed into place when all are complete.
- **Memory.** Old files are mapped; memory holds one new rank's file.
- **Random states.** Rank r < N keeps the generators of old rank r. A further rank gets generators seeded from old rank
  r mod N and r. M ranks do not draw what N would have drawn.
- **HSDP.** One replica is read. The result is plain FSDP2 over M ranks, ``fsdp_config.fsdp_size=-1``.
- **8-bit moments** (torchao) have a scale per block. If a shard boundary falls inside a block, that tensor is stored
  dequantized, in FP32.

FSDP1 is not supported: its optimizer states are pieces of flattened layers, padded depending on N.
"""

import copy
import functools
import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from jetrl_verl.checkpoint.validation import DamagedCheckpointError, check_checkpoint, latest_step, no_trainer_state
from jetrl_verl.inputs import UserError, check_new_folder, load_json, new_folder, reading
from jetrl_verl.patches.checkpoint_tracker import TRACKER_FILE

_SHARDED = ("model", "optim")
_EXTRA = "extra_state"
_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
_DEFAULT_GROUP = "0"
"""torch's name of a process's first group, which a mesh of all ranks uses."""


@dataclass(frozen=True)
class Resharded:
    """The rewritten checkpoint of one role.

    Attributes:
        folder: folder of the new files, ``.../global_step_<n>/actor`` or ``critic``.
        before, after: number of ranks. replicas: of the old ones; more than one was HSDP.
        files, bytes: of the new files.
    """

    folder: Path
    before: int
    after: int
    replicas: int
    files: int
    bytes: int


def reshard(checkpoint: str | Path, gpus: int, out: str | Path | None = None) -> list[Resharded]:
    """Rewrite every role (actor, critic) of a checkpoint for ``gpus`` ranks.

    Args:
        checkpoint: ``global_step_<n>``, one of its roles, or the folder of a run for its latest step.
        gpus: ranks of the run that will resume, over all nodes; not the old number.
        out: a new or empty folder, to be used as ``trainer.default_local_dir``; None writes next to the old files.

    Returns:
        One entry per role.

    Raises:
        UserError: nothing was written.
    """
    for path in (checkpoint, out):
        if ":/" in str(path):
            raise UserError(f"{path} is remote; copy the checkpoint to a local disk and name that.")
    step = _find_step(Path(checkpoint))
    roles = [_Role(folder) for folder in sorted(step.iterdir()) if (folder / "fsdp_config.json").is_file()]
    if not roles:
        raise UserError(
            f"{step} holds no checkpoint of verl's FSDP engines (actor/fsdp_config.json); copy the checkpoint again."
        )
    target = Path(out) if out is not None else None
    if target is not None:
        check_new_folder(target, "--out")
    for role in roles:
        role.check(gpus, in_place=target is None)
    _check_room(sum(role.bytes_of_a_replica for role in roles), target or step)

    try:
        if target is None:
            return _write_in_place(roles, gpus)
        return _write_elsewhere(step, roles, gpus, target)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{target or step} could not be written ({reason}); fix that and start again.") from error


def rows_of_rank(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """First row and end row of a rank's piece under ``torch.chunk``; equal if it is empty."""
    piece = -(-rows // ranks)
    return min(rank * piece, rows), min((rank + 1) * piece, rows)


def rows_of(shards: Sequence[torch.Tensor], begin: int, end: int, like: torch.Tensor) -> torch.Tensor:
    """A copy of rows ``[begin, end)`` of the concatenation of ``shards``.

    Args:
        shards: ``[rows_i, ...]`` of one dtype, by rank; any may be empty, or torchao's 8-bit moments (``codes``,
            ``scale``).
        like: ``[rows, ...]``, shape and dtype of the full tensor.

    Returns:
        ``[end - begin, ...]`` of the shards' dtype and class; dense, of ``like``'s dtype, if 8-bit moments are cut
        inside a block or stored in more than one way.
    """
    pieces = []
    at = 0
    for shard in shards:
        low, high = max(begin, at), min(end, at + shard.shape[0])
        if low < high:
            pieces.append((shard, low - at, high - at))
        at += shard.shape[0]
    if not pieces:
        return torch.empty((0, *like.shape[1:]), dtype=like.dtype)
    kinds = {type(shard) for shard, _, _ in pieces}
    if kinds == {torch.Tensor}:
        return torch.cat([shard[low:high] for shard, low, high in pieces])
    if len(kinds) == 1 and (cut := _cut_blocks(pieces)) is not None:
        return cut
    dense = [shard if type(shard) is torch.Tensor else shard.dequantize(like.dtype) for shard, _, _ in pieces]
    return torch.cat([shard[low:high].to(like.dtype) for shard, (_, low, high) in zip(dense, pieces)])


def _cut_blocks(pieces: list[tuple[torch.Tensor, int, int]]) -> torch.Tensor | None:
    """Rows of torchao's moments with unchanged qdata; None if a block would be cut.

    Args:
        pieces: (tensor, first row, end row), tensors of one class. ``codes`` have the tensor's shape, ``scale [B]``
            belongs to B equal blocks of the flattened codes; other attributes are equal in all of them.
    """
    codes, scales = [], []
    for shard, low, high in pieces:
        names, context = shard.__tensor_flatten__()
        if not {"codes", "scale"} <= set(names) or shard.codes.shape != shard.shape:
            return None
        block, width = shard.codes.numel() // shard.scale.numel(), shard.codes[0].numel()
        if low * width % block or high * width % block:
            return None
        codes.append(shard.codes[low:high])
        scales.append(shard.scale[low * width // block : high * width // block])
    parts = {name: getattr(shard, name).clone() for name in names}
    parts |= {"codes": torch.cat(codes), "scale": torch.cat(scales)}
    return type(shard).__tensor_unflatten__(parts, context)


@functools.lru_cache(maxsize=1)  # one object for all tensors of a file, as verl's have
def mesh_for(mesh: DeviceMesh, ranks: int, rank: int) -> DeviceMesh:
    """The mesh of rank ``rank`` of ``ranks`` under plain FSDP2, made without process groups.

    Args:
        mesh: the old run's, ``(fsdp,)`` or ``(ddp, fsdp)``; gives the device and the name of the last dimension.
    """
    names = mesh.mesh_dim_names[-1:] if mesh.mesh_dim_names else None
    made = DeviceMesh(mesh.device_type, torch.arange(ranks), mesh_dim_names=names, _init_backend=False, _rank=rank)
    made._dim_group_names = [_DEFAULT_GROUP]
    return made


def shard_for(states: Sequence[Any], where: str, ranks: int, rank: int) -> Any:
    """The state of new rank ``rank`` of ``ranks`` from the old ranks' states.

    Args:
        states: a state dict, list, tensor or plain value per old rank of one replica, by rank. DTensors are sharded
            along dimension 0 by the last dimension of their mesh and replicated by the others.
        where: path in the state, for messages.

    Returns:
        The first state with its DTensors replaced.

    Raises:
        UserError: the ranks differ outside of DTensors, or a DTensor is sharded in another way.
    """
    first = states[0]
    if any(type(state) is not type(first) for state in states):
        raise UserError(f"the ranks of the checkpoint hold different types at {where}; it is inconsistent.")
    if isinstance(first, DTensor):
        return _dtensor_for(states, where, ranks, rank)
    if isinstance(first, Mapping):
        if any(state.keys() != first.keys() for state in states):
            raise UserError(f"the ranks of the checkpoint hold different keys at {where}; it is inconsistent.")
        made = copy.copy(first)  # with its class and, of a module's state dict, the version in its attributes
        for key in first:
            made[key] = shard_for([state[key] for state in states], f"{where}[{key!r}]", ranks, rank)
        return made
    if isinstance(first, (list, tuple)) and all(len(state) == len(first) for state in states):
        parts = [shard_for(values, f"{where}[{i}]", ranks, rank) for i, values in enumerate(zip(*states))]
        return type(first)(parts)
    if isinstance(first, torch.Tensor):
        if all(state.dtype == first.dtype and torch.equal(state, first) for state in states):
            return first.clone()
    elif all(state == first for state in states):
        return first
    raise UserError(f"the ranks of the checkpoint hold different values at {where}; it is inconsistent.")


def _dtensor_for(shards: Sequence[DTensor], where: str, ranks: int, rank: int) -> DTensor:
    first = shards[0]
    *others, last = first.placements
    if any(type(placement) is not Replicate for placement in others) or type(last) is not Shard or last.dim != 0:
        raise UserError(
            f"{where} is placed as {first.placements}; only FSDP2's sharding along dimension 0 is supported."
        )
    rows = first.shape[0]
    if any(shard.shape != first.shape for shard in shards) or sum(s._local_tensor.shape[0] for s in shards) != rows:
        raise UserError(f"the shards of {where} do not add up to its {rows} rows; the checkpoint is incomplete.")
    like = torch.empty(first.shape, dtype=first.dtype, device="meta")
    local = rows_of([shard._local_tensor for shard in shards], *rows_of_rank(rows, ranks, rank), like)
    spec = DTensorSpec(mesh_for(first.device_mesh, ranks, rank), (Shard(0),), tensor_meta=first._spec.tensor_meta)
    return DTensor(local, spec, requires_grad=first.requires_grad)


def random_states(states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Random states of new rank ``rank``, in the form of verl's ``get_rng_state``.

    Args:
        states: the old ranks': ``cpu`` (uint8 of torch's generator), ``numpy``, ``random``, and by device name the
            uint8 of its generator.

    Returns:
        Those of the old rank with that number. If there is none, generators seeded with the SHA-256 of ``cpu`` of rank
        ``rank`` mod N and of ``rank``; the state of an accelerator other than ``cuda`` is then left out, and its
        generator keeps the run's seed.
    """
    old = states[rank % len(states)]
    if rank < len(states):
        return dict(old)
    digest = hashlib.sha256(old["cpu"].numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1  # 63 bits, which every generator takes
    made = {
        "cpu": torch.Generator().manual_seed(seed).get_state(),
        "numpy": np.random.RandomState(list(digest)).get_state(),
        "random": random.Random(digest).getstate(),
    }
    if "cuda" in old and old["cuda"].numel() == 16:  # Philox: a seed and an offset, 8 bytes each
        made["cuda"] = torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8)
    return made


# --- reading ---------------------------------------------------------------------------------------------------------


def _find_step(path: Path) -> Path:
    """The folder ``global_step_<n>`` that ``path`` names."""
    path = latest_step(path)
    if (path / "fsdp_config.json").is_file():
        path = path.absolute().parent
    if re.fullmatch(r"global_step_\d+", path.absolute().name) and path.is_dir():
        return path
    raise UserError(f"{path} is not a folder global_step_<n> of a verl run, nor one of its roles; name such a folder.")


class _Role:
    """The files of one role: ``.../global_step_<n>/actor`` or ``critic``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "fsdp_config.json"
        with reading(file, "configuration of verl's FSDP engine", "Copy the checkpoint again"):
            config = load_json(file)
            version, self.ranks = int(config["FSDP_version"]), int(config["world_size"])
        if version != 2:
            raise UserError(
                f"{folder} was written under FSDP1, whose optimizer states cannot be sharded again; resume with "
                f"{self.ranks} GPUs, or merge it (python -m verl.model_merger merge --backend fsdp) and start from the "
                "merged model with strategy=fsdp2."
            )
        matches = [match for file in folder.iterdir() if (match := _FILE.fullmatch(file.name))]
        self.written = {int(match[2]) for match in matches}
        self.contents = {match[1] for match in matches if int(match[2]) == self.ranks}

    def check(self, gpus: int, in_place: bool) -> None:
        """Raise if the role cannot be rewritten for ``gpus`` ranks; reads the checksums of every file.

        Raises:
            UserError: also if ``in_place`` and files of that many ranks exist.
        """
        if gpus == self.ranks:
            raise UserError(f"{self.folder} was written by {gpus} ranks already; resume it as it is.")
        if in_place and gpus in self.written:
            raise UserError(
                f"{self.folder} holds files of {gpus} ranks already; resume with {gpus} GPUs, or remove its "
                f"*_world_size_{gpus}_rank_*.pt first."
            )
        if not self.written:
            raise UserError(no_trainer_state(self.folder))
        if "model" not in self.contents:
            raise UserError(
                f"{self.folder} lacks model_world_size_{self.ranks}_rank_*.pt, which fsdp_config.json names; copy "
                "the checkpoint again."
            )
        try:
            for rank in range(self.ranks):
                check_checkpoint(self.folder, rank, self.ranks)
        except DamagedCheckpointError as error:
            raise UserError(str(error)) from None
        mesh = _mesh_of(self.load("model", 0))
        if mesh is None or mesh.size() != self.ranks or mesh.ndim > 2:
            raise UserError(
                f"{self.file('model', 0)} holds no tensors that FSDP2 sharded over {self.ranks} ranks; name a "
                "checkpoint of verl's fsdp2 strategy."
            )
        self.replica = mesh.mesh.reshape(-1, mesh.shape[-1])[0].tolist()

    @property
    def replicas(self) -> int:
        return self.ranks // len(self.replica)

    @property
    def bytes_of_a_replica(self) -> int:
        files = (self.file(content, rank) for content in self.contents & {*_SHARDED} for rank in self.replica)
        return sum(file.stat().st_size for file in files)

    def file(self, content: str, rank: int, ranks: int | None = None) -> Path:
        return self.folder / f"{content}_world_size_{ranks or self.ranks}_rank_{rank}.pt"

    def load(self, content: str, rank: int) -> Any:
        """A rank's file, with mapped tensors."""
        file = self.file(content, rank)
        with reading(file, "file of a rank", "Use the run's own environment"), _without_group_warnings():
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
            if not isinstance(state, Mapping):
                raise TypeError(f"it holds a {type(state).__name__}")
            return state

    def write(self, folder: Path, gpus: int) -> tuple[int, int]:
        """Write all files of ``gpus`` ranks into ``folder``; returns their number and bytes."""
        files = []
        for content in (name for name in _SHARDED if name in self.contents):
            states = [self.load(content, rank) for rank in self.replica]
            for rank in range(gpus):
                files.append(folder / self.file(content, rank, gpus).name)
                torch.save(shard_for(states, content, gpus, rank), files[-1])
        if _EXTRA in self.contents:
            states = [self.load(_EXTRA, rank) for rank in range(self.ranks)]
            for rank in range(gpus):
                state = dict(states[rank % self.ranks])
                if "rng" in state:
                    state["rng"] = random_states([old["rng"] for old in states], rank)
                files.append(folder / self.file(_EXTRA, rank, gpus).name)
                torch.save(state, files[-1])
        return len(files), sum(file.stat().st_size for file in files)


def _mesh_of(state: Any) -> DeviceMesh | None:
    """The mesh of the first DTensor in a state dict."""
    return next((value.device_mesh for value in state.values() if isinstance(value, DTensor)), None)


@contextmanager
def _without_group_warnings() -> Iterator[None]:
    """Silence torch's line per file about missing process groups."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# --- writing ---------------------------------------------------------------------------------------------------------


def _check_room(needed: int, folder: Path) -> None:
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"the new files need {decimal(needed)} and the disk of {existing} has {decimal(free)} left; make room, or "
            "name a folder on another disk with --out."
        )


def _write_in_place(roles: list[_Role], gpus: int) -> list[Resharded]:
    """New files in the roles' folders, renamed into place when those of all roles are complete."""
    stages = [role.folder / f".reshard-{os.getpid()}" for role in roles]
    try:
        written = []
        for role, stage in zip(roles, stages):
            stage.mkdir()
            written.append(Resharded(role.folder, role.ranks, gpus, role.replicas, *role.write(stage, gpus)))
        for role, stage in zip(roles, stages):
            for file in sorted(stage.iterdir()):
                file.rename(role.folder / file.name)
    finally:
        for stage in stages:
            shutil.rmtree(stage, ignore_errors=True)
    return written


def _write_elsewhere(step: Path, roles: list[_Role], gpus: int, out: Path) -> list[Resharded]:
    """``out`` with this one step, everything but the old ranks' files copied, and verl's tracker."""
    name, written = step.absolute().name, []
    with new_folder(out) as building:
        copied = building / name
        shutil.copytree(step, copied, ignore=lambda _, names: [file for file in names if _FILE.fullmatch(file)])
        for role in roles:
            folder = copied / role.folder.name
            facts = role.write(folder, gpus)
            config = json.loads((folder / "fsdp_config.json").read_text())
            (folder / "fsdp_config.json").write_text(json.dumps(config | {"world_size": gpus}, indent=4))
            written.append(Resharded(out / name / folder.name, role.ranks, gpus, role.replicas, *facts))
        (building / TRACKER_FILE).write_text(name.removeprefix("global_step_"))
    return written


def run_reshard(checkpoint: str, gpus: int, out: str | None) -> None:
    """The command: reshard, then print what was written and how to resume. Raises ``UserError``."""
    written = reshard(checkpoint, gpus, out)
    for role in written:
        line = f"{role.folder}: {role.before} ranks -> {role.after}, {role.files} files, {decimal(role.bytes)}"
        print(line)
    ranks = f"trainer.n_gpus_per_node times trainer.nnodes = {gpus}"
    plain = ", fsdp_config.fsdp_size=-1" if any(role.replicas > 1 for role in written) else ""
    step = written[0].folder.absolute().parent
    print(f"resume with {ranks}{plain} trainer.resume_mode=resume_path trainer.resume_from_path={step}")
