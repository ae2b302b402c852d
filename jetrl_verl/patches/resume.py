# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""A damaged checkpoint is refused by name, before a byte of it is loaded.

What verl 0.9.1 and torch do by themselves with a checkpoint that a full disk or a lost machine has left behind:

* a truncated file fails in ``torch.load`` with a message about zip archives that names neither file nor remedy;
* a file whose bytes changed, or whose blocks the file system never wrote, *loads*: torch writes a checksum per tensor
  and does not read it back;
* a full disk ends in ``unexpected pos 2853504 vs 2853396``, which names neither disk nor file;
* an empty ``latest_checkpointed_iteration.txt`` (verl truncates it before it writes) ends in ``int("")``, and one that
  points to a folder that is gone starts the training from scratch without a word.

Nothing is skipped silently here: which checkpoint to go back to is the user's choice, and each message says how.
Reading the checksums costs one pass over the files per rank, which warms the page cache for the load behind it.

Gone when verl verifies what it resumes from; no upstream issue is known.
"""

import contextlib
import functools
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetrl_verl.patches.trainer import trainer_module

_CONTENTS = ("model", "optim", "extra_state")

INT8_SCALES = "int8_scales.pt"
"""File of rank 0 beside verl's: the scales that ``jetrl.int8_scales=first`` keeps."""

_OF_THE_WRITE = re.compile("inline_container|PytorchStreamWriter|unexpected pos")
"""What the errors of torch's zip writer say, which are plain RuntimeErrors."""


class DamagedCheckpointError(RuntimeError):
    """A checkpoint cannot be resumed from; the message names the file and what to do."""


class UnwrittenCheckpointError(RuntimeError):
    """A checkpoint could not be written; the message names the folder, the room on its disk and what to do."""


@contextlib.contextmanager
def explained(folder: str | Path) -> Iterator[None]:
    """What the disk does to a checkpoint that is written to ``folder``, with the room that it has left.

    Other errors of a save, such as those of a GPU or of NCCL, pass.

    Raises:
        UnwrittenCheckpointError: from the error of the write.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        existing = next((place for place in (Path(folder), *Path(folder).parents) if place.exists()), None)
        of_the_write = isinstance(error, OSError) or _OF_THE_WRITE.search(str(error))
        if not of_the_write or "://" in str(folder) or existing is None:
            raise
        free = shutil.disk_usage(existing).free / 2**20
        reason = str(error).partition("\n")[0]
        raise UnwrittenCheckpointError(
            f"checkpoint: {folder} could not be written ({reason}); its disk has {free:.0f} MiB left; make room and "
            "start again with trainer.resume_mode=auto, which goes on from the last complete checkpoint"
        ) from error


def check_checkpoint(folder: str | Path, rank: int, world_size: int) -> None:
    """Read one rank's files of a checkpoint and compare them with the checksums they carry.

    Args:
        folder: ``.../global_step_<n>/actor`` (or ``critic``) as verl's FSDP checkpoint manager wrote it. A path on a
            remote file system is left to verl.
        rank, world_size: of this process; rank 0 also reads ``INT8_SCALES`` and ``data.pt`` beside the folder.

    Raises:
        DamagedCheckpointError: a file is missing, truncated, or has other bytes than were written.
    """
    if "://" in str(folder):
        return
    folder = Path(folder)
    written = {
        int(found.group(1)) for file in folder.glob("*.pt") if (found := re.search(r"world_size_(\d+)_", file.name))
    }
    if written and world_size not in written:
        raise DamagedCheckpointError(
            f"the checkpoint {folder} was written by {', '.join(map(str, sorted(written)))} ranks and this run has "
            f"{world_size}; resume with as many GPUs, or rewrite it with optimiser and schedule (FSDP2; jetrl reshard "
            f"{folder.parent} --gpus {world_size}), or merge it (python -m verl.model_merger merge --backend fsdp) and "
            "start from the merged model"
        )
    files = [folder / f"{content}_world_size_{world_size}_rank_{rank}.pt" for content in _CONTENTS]
    if rank == 0:
        files += [file for file in (folder / INT8_SCALES, folder.parent / "data.pt") if file.exists()]
    present = [file for file in files if file.exists()]
    # What the user chose not to save (checkpoint.save_contents) is absent on every rank.
    for file in set(files) - set(present):
        if not present or any(folder.glob(f"{file.name.partition('_world')[0]}_world_size_*.pt")):
            raise DamagedCheckpointError(f"the checkpoint file {file} is missing; {_remedy(folder.parent)}")
    for file in present:
        fault = _fault_of(file)
        if fault is not None:
            raise DamagedCheckpointError(f"the checkpoint file {file} is damaged ({fault}); {_remedy(folder.parent)}")


def drop_other_world_sizes(folder: str | Path, world_size: int) -> None:
    """Delete the shards that another number of ranks left in a folder which this many have now written.

    verl clears no folder that it saves to, so a run that went back to an earlier step on other GPUs would leave two
    policies there, and a resume on the old number of GPUs would take the older one.
    """
    if "://" in str(folder):
        return
    for content in _CONTENTS:
        for file in Path(folder).glob(f"{content}_world_size_*_rank_*.pt"):
            if not file.name.startswith(f"{content}_world_size_{world_size}_"):
                file.unlink(missing_ok=True)  # every rank of a machine does the same


def _fault_of(file: Path) -> str | None:
    """What is wrong with a file of ``torch.save``, None if its bytes are those that were written."""
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, zlib.error, NotImplementedError) as error:
        return f"{file.stat().st_size} bytes, not a complete file: {error}"
    return None if bad is None else f"the checksum of its part {bad} differs"


def _steps(folder: Path) -> Iterator[int]:
    """Steps of the checkpoints in ``trainer.default_local_dir``."""
    for path in folder.glob("global_step_*"):
        if path.name.removeprefix("global_step_").isdigit():
            yield int(path.name.removeprefix("global_step_"))


def _remedy(damaged: Path) -> str:
    """How to go on without the checkpoint ``.../global_step_<n>``."""
    step = damaged.name.removeprefix("global_step_")
    earlier = [other for other in _steps(damaged.parent) if step.isdigit() and other < int(step)]
    if not earlier:
        return "there is no earlier checkpoint; start again with trainer.resume_mode=disable"
    before = damaged.with_name(f"global_step_{max(earlier)}")
    return f"resume from the one before with trainer.resume_mode=resume_path trainer.resume_from_path={before}"


def install_in_trainer() -> None:
    """Wrap the trainer's look-up of the latest checkpoint, in the process that holds verl's trainer; idempotent."""
    trainer = trainer_module()
    if trainer is None or getattr(trainer.find_latest_ckpt_path, "_jetrl", False):
        return
    stock = trainer.find_latest_ckpt_path

    @functools.wraps(stock)
    def find_latest_ckpt_path(path: str, *args: Any, **kwargs: Any) -> str | None:
        from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

        tracker = Path(get_checkpoint_tracker_filename(path))
        if tracker.exists():
            check_tracker(tracker)
        return stock(path, *args, **kwargs)

    find_latest_ckpt_path._jetrl = True
    trainer.find_latest_ckpt_path = find_latest_ckpt_path


def check_tracker(tracker: Path) -> None:
    """Raise ``DamagedCheckpointError`` unless verl's tracker file names the step of a checkpoint beside it."""
    steps = sorted(_steps(tracker.parent))
    remedy = "there is no checkpoint beside it; start again with trainer.resume_mode=disable"
    if steps:
        held = ", ".join(map(str, steps))
        remedy = f"write the step of the newest complete checkpoint into it, of {held} in {tracker.parent}"
    text = tracker.read_text(errors="replace").strip()
    if not text.isdigit():
        raise DamagedCheckpointError(f"{tracker} holds {text!r} and not a step, as after a full disk; {remedy}")
    if int(text) not in steps:
        raise DamagedCheckpointError(f"{tracker} says step {text}, whose checkpoint is gone; {remedy}")
