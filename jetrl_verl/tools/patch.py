# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl patch``: write the replacements of patches/ into a checkout of verl or vLLM, as a diff for upstream."""

import difflib
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from jetrl_verl.inputs import reading, writing
from jetrl_verl.patches import all_patches, installed_states
from jetrl_verl.patches.patch import PatchError


def patch_into(folder: Path, write: bool) -> str:
    """Write every patch of the packages in ``folder``, or none where one does not fit.

    Args:
        folder: a checkout, ``site-packages``, or the package's folder. write: False leaves the files.

    Returns:
        The unified diff, empty if every replacement is there already.

    Raises:
        PatchError: neither verl nor vLLM, or a function that is neither the pinned one nor the replacement.
    """
    with reading(folder, "folder", "Set --into to the folder that holds the package"):
        if (folder / "__init__.py").exists():
            folder = folder.parent
        patches = [patch for patch in all_patches() if (folder / patch.project / "__init__.py").exists()]
    if not patches:
        raise PatchError(f"{folder} holds neither verl nor vllm. Set --into to the folder that holds the package.")
    before: dict[Path, str] = {}
    after: dict[Path, str] = {}
    for patch in patches:
        file = folder / patch.path
        with reading(file, "source file", "Check the package out again", PatchError):
            before.setdefault(file, file.read_text(encoding="utf-8") if file.exists() else "")
            after[file] = patch.written_into(after.get(file, before[file]))
    if write:
        for file, text in after.items():
            if text != before[file]:
                with writing(file, "the source file"):
                    file.write_text(text)
    return "".join(
        line
        for file, text in after.items()
        for line in difflib.unified_diff(
            before[file].splitlines(keepends=True),
            text.splitlines(keepends=True),
            f"a/{file.relative_to(folder)}",
            f"b/{file.relative_to(folder)}",
        )
    )


def list_patches(console: Console) -> None:
    """Print each patch: its function, its state in the installed packages, the symptom without it, and its end."""
    for file, states in groupby(installed_states(), key=lambda state: state[0].file):
        console.print(Text(file, style="bold"))
        for patch, state in states:
            console.print(Padding(Text(f"{patch.replaces}: {state}", overflow="fold"), (0, 0, 0, 2)))
            console.print(Padding(Text(f"without it {patch.symptom}"), (0, 0, 0, 4)))
            console.print(Padding(Text(f"until {patch.until}"), (0, 0, 0, 4)))
