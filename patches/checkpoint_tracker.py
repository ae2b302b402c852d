# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Check ``latest_checkpointed_iteration.txt`` before a run resumes, and refuse a damaged one.

verl 0.9.1 truncates the file before it writes it. After a full disk it is empty and a resume ends in ``int("")``; if it
points to a folder that is gone, training silently starts from scratch. The user chooses the checkpoint to go back to.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetrl_verl.patches.patch import Patch

TRACKER_FILE = "latest_checkpointed_iteration.txt"


class DamagedCheckpointError(RuntimeError):
    """A checkpoint cannot be resumed from; the message names the file and what to do."""


def steps_in(folder: Path) -> Iterator[int]:
    """Steps of the checkpoints in ``trainer.default_local_dir``."""
    for path in folder.glob("global_step_*"):
        if path.name.removeprefix("global_step_").isdigit():
            yield int(path.name.removeprefix("global_step_"))


def check_tracker(tracker: Path) -> int:
    """Step named by verl's tracker file; raises ``DamagedCheckpointError`` if that checkpoint is not next to it."""
    steps = sorted(steps_in(tracker.parent))
    remedy = "there is no checkpoint next to it; start again with trainer.resume_mode=disable"
    if steps:
        available = ", ".join(map(str, steps))
        remedy = f"write the step of the newest complete checkpoint into it, of {available} in {tracker.parent}"
    text = tracker.read_text(errors="replace").strip()
    if not text.isdigit():
        raise DamagedCheckpointError(f"{tracker} holds {text[:20]!r} and not a step, as after a full disk; {remedy}")
    if int(text) not in steps:
        raise DamagedCheckpointError(f"{tracker} says step {text}, whose checkpoint is gone; {remedy}")
    return int(text)


def find_latest_ckpt_path(stock, path: str | None, *args: Any, **kwargs: Any) -> str | None:
    if path is not None:
        tracker = Path(path, TRACKER_FILE)
        if os.path.exists(tracker):
            check_tracker(tracker)
    return stock(path, *args, **kwargs)


TRACKER = Patch(
    replaces="verl.utils.checkpoint.checkpoint_manager:find_latest_ckpt_path",
    sha256={"0.9.1": "f832df1548752dfb2fa96f03a784035d75eb83c7e100eb1f66e0518786a27cea"},
    by=find_latest_ckpt_path,
    symptom="a run whose latest checkpoint is gone starts from scratch without a word",
    upstream="nothing that verl resumes from is verified; no issue is known",
    until="verl verifies what it resumes from",
    needed=True,
)
PATCHES = (TRACKER,)
