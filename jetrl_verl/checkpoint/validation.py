# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stops a resume from a damaged checkpoint, naming the file, before anything is loaded.

torch reports a truncated file as a broken zip archive and does not verify the checksums that it writes, so flipped
bytes load; a full disk ends in ``unexpected pos 2853504 vs 2853396``. The checksums cost one pass over the files per
rank. patches/checkpoint_tracker.py reads verl's note of the latest checkpoint.
"""

import contextlib
import re
import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from jetrl_verl.config.model import trained_models
from jetrl_verl.config.support.scopes import ACTOR, MODEL
from jetrl_verl.inputs import UserError, reading
from jetrl_verl.patches.checkpoint_tracker import TRACKER_FILE, DamagedCheckpointError, check_tracker, steps_in

_FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""What verl's ``save_contents`` and ``load_contents`` name, and the names of its files."""
_CONTENTS = tuple(_FILES.values())

KEPT_SCALES = "int8_scales.pt"
"""Rank 0's file with the scales that ``jetrl.int8_scales=first`` keeps."""

_OF_THE_WRITE = re.compile("inline_container|PytorchStreamWriter|unexpected pos")
"""Words in the errors of torch's zip writer, plain RuntimeErrors."""


class UnwrittenCheckpointError(RuntimeError):
    """A checkpoint could not be written; the message names the folder and the space left on its disk."""


@contextlib.contextmanager
def explained(folder: str | Path) -> Iterator[None]:
    """Turn a failed write of a checkpoint to ``folder`` into an error that names the space left on its disk.

    Raises:
        UnwrittenCheckpointError: from the error of the write; errors of a GPU or of NCCL pass unchanged.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        existing = next((path for path in (Path(folder), *Path(folder).parents) if path.exists()), None)
        of_the_write = isinstance(error, OSError) or _OF_THE_WRITE.search(str(error))
        if not of_the_write or "://" in str(folder) or existing is None:
            raise
        free = shutil.disk_usage(existing).free / 2**20
        reason = str(error).partition("\n")[0]
        raise UnwrittenCheckpointError(
            f"checkpoint: {folder} could not be written ({reason}); its disk has {free:.0f} MiB left. Make room and "
            "start again with trainer.resume_mode=auto, which resumes from the last complete checkpoint."
        ) from error


def check_checkpoint(folder: str | Path, rank: int, world_size: int) -> None:
    """Read one rank's files of a checkpoint and compare them with the checksums they carry.

    Args:
        folder: ``.../global_step_<n>/actor`` (or ``critic``) of verl's FSDP checkpoint manager; remote paths pass.
        rank, world_size: of this process; rank 0 also reads ``KEPT_SCALES`` and ``../data.pt``.

    Raises:
        DamagedCheckpointError: a file is missing, truncated or has changed.
    """
    if "://" in str(folder):
        return
    folder = Path(folder)
    check_ranks(folder, world_size)
    files = [folder / f"{content}_world_size_{world_size}_rank_{rank}.pt" for content in _CONTENTS]
    if rank == 0:
        files += [file for file in (folder / KEPT_SCALES, folder.parent / "data.pt") if file.exists()]
    present = [file for file in files if file.exists()]
    # Contents that the user chose not to save (checkpoint.save_contents) are absent on every rank.
    for file in set(files) - set(present):
        if not present or any(folder.glob(f"{file.name.partition('_world')[0]}_world_size_*.pt")):
            raise DamagedCheckpointError(f"the checkpoint file {file} is missing; {_remedy(folder.parent)}")
    for file in present:
        fault = _fault_of(file)
        if fault is not None:
            raise DamagedCheckpointError(f"the checkpoint file {file} is damaged ({fault}); {_remedy(folder.parent)}")


def latest_step(folder: Path) -> Path:
    """The folder that verl's note of the latest checkpoint in ``folder`` names; ``folder`` itself without a note.

    Raises:
        UserError: the note is damaged, or that checkpoint is gone.
    """
    tracker, remedy = folder / TRACKER_FILE, "Name a folder global_step_<n>"
    try:
        with reading(tracker, "note of the latest checkpoint", remedy, DamagedCheckpointError):
            return folder / f"global_step_{check_tracker(tracker)}" if tracker.exists() else folder
    except DamagedCheckpointError as error:
        raise UserError(str(error)) from None


def check_ranks(folder: Path, world_size: int) -> None:
    """Raise ``DamagedCheckpointError`` if a role's folder was written by another number of ranks only."""
    matches = [re.search(r"world_size_(\d+)_", file.name) for file in folder.glob("*.pt")]
    written = {int(match.group(1)) for match in matches if match}
    if written and world_size not in written:
        count = ", ".join(map(str, sorted(written)))
        raise DamagedCheckpointError(
            f"the checkpoint {folder} was written by {count} {'rank' if written == {1} else 'ranks'} and this run has "
            f"{world_size}. Resume with as many GPUs, or rewrite it with optimizer and schedule (FSDP2; jetrl reshard "
            f"{folder.parent} --gpus {world_size}), or merge it (python -m verl.model_merger merge --backend fsdp) and "
            "start from the merged model."
        )


def resume_folder(config: DictConfig) -> Path | None:
    """Folder ``.../global_step_<n>`` that a run resumes from; None for a fresh start, and for a remote folder.

    It may be absent on this machine: files of a role lie on its workers' hosts.

    Raises:
        DamagedCheckpointError: verl's note of the latest checkpoint is damaged.
    """
    trainer = OmegaConf.select(config, "trainer") or {}
    mode, folder = trainer.get("resume_mode"), trainer.get("default_local_dir")
    if mode == "resume_path" and (step := trainer.get("resume_from_path")) is not None:
        return None if "://" in str(step) else Path(step)
    if mode == "auto" and folder is not None and (tracker := Path(folder, TRACKER_FILE)).exists():
        return Path(folder, f"global_step_{check_tracker(tracker)}")
    return None


def check_resume(config: DictConfig) -> None:
    """In the driver, before Ray: check the names of the checkpoint's files; hosts check bytes
    (:func:`check_checkpoint`).

    Raises:
        DamagedCheckpointError: as :func:`resume_folder`; or the number of ranks differs, or a resume would load no
            weights, or lacks what ``load_contents`` asks for.
    """
    step = resume_folder(config)
    if step is None:
        return
    get = partial(OmegaConf.select, config)
    ranks = int(get("trainer.n_gpus_per_node") or 1) * int(get("trainer.nnodes") or 1)
    for model in trained_models(get):
        role, node = ("actor", ACTOR) if model == MODEL else ("critic", "critic")
        check_ranks(step / role, ranks)
        # Rank 0 writes this file, so its shards are on this machine, too.
        if (step / role / "fsdp_config.json").is_file():
            key = f"{node}.checkpoint.load_contents"
            _check_contents(step / role, ranks, key, get(key) or list(_FILES))
    if (step / "actor" / "fsdp_config.json").is_file() and not (step / "data.pt").is_file():
        line = f"jetrl_verl: warning: the checkpoint {step} has no data.pt, so prompts start again from the first one."
        print(f"{line} Copy the file there if that is not what you want.", file=sys.stderr, flush=True)


def _check_contents(folder: Path, ranks: int, key: str, load_contents: Iterable[str]) -> None:
    """Compare what was saved with the value of ``key``."""
    saved = [name for name, file in _FILES.items() if any(folder.glob(f"{file}_world_size_{ranks}_rank_*.pt"))]
    wanted = [name for name in load_contents if name in _FILES]
    if "model" not in saved:
        raise DamagedCheckpointError(no_trainer_state(folder))
    if "model" not in wanted:
        raise DamagedCheckpointError(
            f"the checkpoint {folder} would be resumed without its weights ({key}={_listed(load_contents)}), so "
            f"training would start from the base model. Set {key}={_listed(saved)}, or trainer.resume_mode=disable."
        )
    if missing := [name for name in wanted if name not in saved]:
        raise DamagedCheckpointError(
            f"the checkpoint {folder} does not hold {' and '.join(missing)}, which {key} asks for. Set "
            f"{key}={_listed(saved)}, which starts {'them' if missing[1:] else 'it'} afresh."
        )


def no_trainer_state(folder: Path) -> str:
    """One sentence about a role's folder without the trainer's weights: what it holds, and what to start from."""
    merged = folder / "huggingface"
    start = "start again with trainer.resume_mode=disable"
    if any(merged.glob("*.safetensors")):
        start = f"start from the model folder {merged}, or set trainer.resume_mode=disable"
    return (
        f"the checkpoint {folder} holds no trainer state (checkpoint.save_contents was without `model`), so there is "
        f"nothing to resume; {start}."
    )


def _listed(contents: Iterable[str]) -> str:
    return f"[{','.join(contents)}]"


def drop_other_world_sizes(folder: str | Path, world_size: int) -> None:
    """Delete shards of other numbers of ranks from a folder that was just written.

    verl does not clear the folder, so a later resume on the old number of GPUs would load an older policy.
    """
    if "://" in str(folder):
        return
    for content in _CONTENTS:
        for file in Path(folder).glob(f"{content}_world_size_*_rank_*.pt"):
            if not file.name.startswith(f"{content}_world_size_{world_size}_"):
                file.unlink(missing_ok=True)  # every rank of a machine does this


def _fault_of(file: Path) -> str | None:
    """The fault of a file of ``torch.save``; None if its checksums match."""
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, zlib.error, NotImplementedError) as error:
        return f"{file.stat().st_size} bytes, not a complete file: {error}"
    return None if bad is None else f"the checksum of its part {bad} differs"


def _remedy(damaged: Path) -> str:
    """How to go on without the checkpoint ``.../global_step_<n>``."""
    step = damaged.name.removeprefix("global_step_")
    earlier = [other for other in steps_in(damaged.parent) if step.isdigit() and other < int(step)]
    if not earlier:
        return "there is no earlier checkpoint; start again with trainer.resume_mode=disable"
    before = damaged.with_name(f"global_step_{max(earlier)}")
    return f"resume from the one before with trainer.resume_mode=resume_path trainer.resume_from_path={before}"
