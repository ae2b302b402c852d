# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The data files of a job that the driver can read: whether they open, and whether samples have more than text."""

from collections.abc import Collection, Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from jetrl_verl.inputs import reading

from .support.row import Get, UnsupportedConfiguration


def find_media(get: Get, *, images: bool) -> str:
    """Where the first sample of a job's local data has an image or, without ``images``, anything else but text.

    Returns:
        In words; empty if no sample has it, and under a dataset class of the user's.

    Raises:
        UnsupportedConfiguration: a file is missing or does not open.
    """
    if get("data.custom_cls.path") is not None:
        return ""
    columns = {get(f"data.{kind}_key") for kind in (("image",) if images else ("video", "audio"))} - {None}
    prompt = get("data.prompt_key")
    for key in ("data.train_files", "data.val_files"):
        for path in _local_files(key, get(key)):
            kind = path.suffix.removeprefix(".")
            with reading(f"the data file {path} ({key})", f"{kind} file", "Write it again", UnsupportedConfiguration):
                seen = (media_of(row, prompt, columns, images) for row in _rows(path, prompt, columns))
                if where := next(filter(None, seen), ""):
                    return f"{where} of {path} ({key})"
    return ""


def _local_files(key: str, files: Any) -> Iterator[Path]:
    """The local files of a key that are of a format known here."""
    for name in files if isinstance(files, list | tuple) else [files]:
        if name is not None and "://" not in str(name):
            yield from (path for path in _data_files(key, name) if path.suffix in (".parquet", ".json", ".jsonl"))


def _rows(path: Path, prompt: str | None, media: Collection[str]) -> Iterator[dict[str, Any]]:
    """Rows of a data file with what :func:`media_of` reads; the first one is read whole."""
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
        # Few rows at once, since the first one may have large images.
        for batch in file.iter_batches(batch_size=64, columns=wanted) if wanted else ():
            yield from batch.to_pylist()


def media_of(row: dict[str, Any], prompt: str | None, media: Collection[str], images: bool) -> str:
    """Where verl would find an image or, without ``images``, a video or a sound in a row; empty if it has none."""
    if column := next((name for name in media if row.get(name)), None):
        return f"the column {column}"
    messages = row.get(prompt)
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") or "text"
            if kind != "text" and (kind == "image") == images:
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
