# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the driver's machine before Ray starts: versions, patches, optimizers, models and data files.

What is not supported is a row of ``support/machine.py``; what the workers' machines are, ``workers`` asks.
"""

from collections.abc import Collection, Iterator
from glob import glob, has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from jetrl_verl.inputs import reading

from .attention import check_attention_package
from .job import Job
from .model import check_models
from .support.limits import PINS, RELEASES
from .support.row import Get, UnsupportedConfiguration
from .support.scopes import OPTIMIZERS
from .support.table import refuse


def check_environment(job: Job, get: Get) -> None:
    """Raise ``UnsupportedConfiguration`` (one sentence) if this machine cannot run a job of a composed config."""
    check_versions(job)
    check_patches(job)
    for key in OPTIMIZERS:
        check_optimizer(job, key, get(key))
    check_attention_package(job.options.precision, get)
    check_models(job, get)
    if get("data.custom_cls.path") is None:
        media = {get(f"data.{kind}_key") for kind in ("image", "video", "audio")} - {None}
        for key in ("data.train_files", "data.val_files"):
            check_data(key, get(key), job.options.precision, get("data.prompt_key"), media)


def is_pinned(package: str, version: str) -> bool:
    """Whether a version is of ``RELEASES``; one that cannot be read is not."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return False
    return any(release[: len(wanted)] == wanted for wanted in (Version(pin).release for pin in RELEASES[package]))


def check_versions(job: Job) -> None:
    """Compare the installed packages with ``PINS``."""
    precision = job.options.precision
    for package, pin in PINS.items():
        installed = job.versions[package]
        if installed is None:
            what, remedy = f"an environment without {package}", f"Set up {package} {pin}"
            refuse("missing_package", precision=precision, what=what, remedy=remedy)
        if not is_pinned(package, installed):
            why = f"it works with {package} {pin} (docs/upgrade.md says what others change)"
            remedy = f"Set up {package} {pin}, or precision=bf16"
            refuse("version", precision=precision, what=f"{package} {installed}", why=why, remedy=remedy)


def check_optimizer(job: Job, key: str, module: str | None) -> None:
    """Refuse an optimizer whose package is not installed: a worker would only find out after loading the model."""
    package = (module or "torch").partition(".")[0]
    if find_spec(package) is None:
        why, remedy = f"{package} is not installed", f"Install {package}"
        refuse("optimizer_package", precision=job.options.precision, key=key, value=module, why=why, remedy=remedy)


def check_patches(job: Job) -> None:
    """Refuse a modified verl or vLLM that a required patch cannot be applied to."""
    from jetrl_verl.patches import installed_states
    from jetrl_verl.patches.patch import PATCHED, STOCK

    for patch, state in installed_states():
        if patch.needed and state not in (STOCK, PATCHED):
            mismatch = patch.mismatch(state).rpartition(". Install ")[0]
            remedy = f"Set up {patch.pinned}, or precision=bf16"
            what = f"the installed {patch.project}"
            refuse("patch", precision=job.options.precision, what=what, why=mismatch, remedy=remedy)


def check_data(
    key: str, files: Any, precision: str, prompt: str | None = "prompt", media: Collection[str] = ()
) -> None:
    """Check that each local file of ``data.train_files`` or ``data.val_files`` opens and holds text alone: nothing in
    the columns ``media``, no other part in a message of the column ``prompt``."""
    if files is None:
        return
    for name in files if isinstance(files, list | tuple) else [files]:
        if "://" in str(name):
            continue
        for path in _data_files(key, name):
            if (kind := path.suffix.removeprefix(".")) not in ("parquet", "json", "jsonl"):
                continue
            with reading(f"the data file {path} ({key})", f"{kind} file", "Write it again", UnsupportedConfiguration):
                seen = next(filter(None, (_media_of(row, prompt, media) for row in _rows(path, prompt, media))), None)
            if seen:
                refuse("images", precision=precision, what=f"{seen} of {path} ({key})")


def _rows(path: Path, prompt: str | None, media: Collection[str]) -> Iterator[dict[str, Any]]:
    """Rows of a data file with what :func:`_media_of` reads; the first one is read whole."""
    if path.suffix != ".parquet":
        from datasets import load_dataset  # as verl reads it, which then finds what this has cached

        rows = load_dataset("json", data_files=str(path))["train"]
        yield from rows.select_columns([name for name in rows.column_names if name == prompt or name in media])
        return
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        # The footer may be whole where the data is not.
        next(file.iter_batches(batch_size=1), None)
        leaves = [file.schema.column(i).path for i in range(len(file.schema))]
        wanted = [
            leaf
            for leaf in leaves
            if (name := leaf.partition(".")[0]) in media
            or name == prompt
            and ".content." in leaf
            and leaf.endswith(".type")
        ]
        for batch in file.iter_batches(columns=wanted) if wanted else ():
            yield from batch.to_pylist()


def _media_of(row: dict[str, Any], prompt: str | None, media: Collection[str]) -> str:
    """Where verl would find an image, a video or a sound in a row; empty for text."""
    if column := next((name for name in media if row.get(name)), None):
        return f"the column {column}"
    messages = row.get(prompt)
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if (kind := part.get("type") or "text") != "text":
                return f"a part of type {kind} in the column {prompt}"
    return ""


def _data_files(key: str, name: Any) -> list[Path]:
    """Local files that ``datasets.load_dataset``, to which verl hands ``name``, finds under it: one, or a pattern's."""
    path = Path(name).expanduser()
    if has_magic(str(path)):
        files = [file for file in map(Path, sorted(glob(str(path), recursive=True))) if file.is_file()]
        if not files:
            raise UnsupportedConfiguration(f"the pattern {name} ({key}) matches no data file. Check the path.")
        return files
    if not path.exists():
        raise UnsupportedConfiguration(f"the data file {name} ({key}) does not exist. Check the path.")
    return [path]
