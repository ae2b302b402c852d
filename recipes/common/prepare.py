# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Read raw splits from the hub or from files and write verl's parquet, for every ``prepare_data.py``.

A split, its raw file, its argument and its result have one name::

    python3 -m recipes.gsm8k.prepare_data                                       # every split, from the hub
    python3 -m recipes.gsm8k.prepare_data --local-dir raw                       # raw/train.jsonl, raw/test.jsonl
    python3 -m recipes.gsm8k.prepare_data train --local-file train=a/b.parquet  # one split, from one file

A raw file is the hub's: ``.parquet``, or ``.json`` / ``.jsonl`` (also ``.gz``), or a folder of such files, read in the
order of their names. Rows keep their order (verl shuffles with ``data.seed``), so the same raw file gives the same
bytes. All sources have one schema, since verl concatenates its files.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pyarrow
import pyarrow.parquet
import typer

from recipes.common.sources import Problem, RecordError, Source

SCHEMA = pyarrow.schema(
    {
        "data_source": pyarrow.string(),
        "prompt": pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})),
        "ability": pyarrow.string(),
        "reward_model": pyarrow.struct({"style": pyarrow.string(), "ground_truth": pyarrow.string()}),
        "extra_info": pyarrow.struct({"split": pyarrow.string(), "index": pyarrow.int64()}),
    }
)
"""verl's schema for reinforcement learning from rules; ``index`` counts the rows of the written file."""

SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")

_BATCH = 1000


class PrepareError(Exception):
    """Data cannot be prepared; the message is one sentence that says what is wrong and what to do."""


def prepare(source: Source, output: Path, raw: Path | None = None) -> int:
    """Write one split as parquet and return its number of rows; the file appears complete or not at all.

    Args:
        source: describes the raw records.
        output: parquet file to write; its folder is created.
        raw: raw file or folder; None reads from the hub.

    Raises:
        PrepareError: the raw data cannot be read, lack a column, hold no record or a wrong one; or ``output`` is
            ``raw``.
    """
    if raw is not None and raw.resolve() == output.resolve():
        raise PrepareError(f"{raw} would be replaced by its own result; choose another folder with --out")
    rows = [_row(problem, source.split, index) for index, problem in enumerate(_problems(source, raw))]
    if not rows:
        raise PrepareError(f"{_place(source, raw)} holds no record; check the file")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, SCHEMA), partial)
    os.replace(partial, output)
    return len(rows)


def _row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": problem.data_source,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {"split": split, "index": index},
    }


def _problems(source: Source, raw: Path | None) -> Iterator[Problem]:
    seen: set[str] = set()
    for number, record in enumerate(_records(source, raw)):
        try:
            problem = source.problem(record)
        except RecordError as error:
            raise PrepareError(
                f"record {number} of {_place(source, raw)} {error}; give a raw file of {source.hub}"
            ) from error
        if not (source.unique and problem.prompt in seen):
            yield problem
        seen.add(problem.prompt)


def _records(source: Source, raw: Path | None) -> Iterator[dict[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="jetrl-prepare-") as cache:  # no second copy of raw files
        try:
            if raw is None:
                table = datasets.load_dataset(source.hub, source.config, split=source.split)
            else:
                files = _files(raw)
                kind = "parquet" if files[0].suffix == ".parquet" else "json"
                table = datasets.load_dataset(
                    kind, data_files=[str(file) for file in files], split="train", cache_dir=cache
                )
        except PrepareError:
            raise
        except Exception as error:  # from the hub's client, the network or a parser
            remedy = "check the file" if raw else "without a network give raw files with --local-dir or --local-file"
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise PrepareError(f"{_place(source, raw)} cannot be read ({reason}); {remedy}") from error
        missing = [column for column in source.columns if column not in table.column_names]
        if missing:
            raise PrepareError(
                f"{_place(source, raw)} has no column '{missing[0]}' but {', '.join(table.column_names)}; "
                f"give a raw file of {source.hub}"
            )
        for batch in table.select_columns(list(source.columns)).iter(_BATCH):
            yield from (dict(zip(batch, values)) for values in zip(*batch.values()))


def _files(raw: Path) -> list[Path]:
    if not raw.exists():
        raise PrepareError(f"the raw file {raw} does not exist; check the path")
    files = sorted(path for path in raw.rglob("*") if _is_raw(path)) if raw.is_dir() else [raw]
    if not files or not _is_raw(files[0]):
        raise PrepareError(f"{raw} is none of {', '.join(SUFFIXES)} nor a folder of them; give one")
    return files


def _is_raw(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and path.is_file()


def _place(source: Source, raw: Path | None) -> str:
    return str(raw) if raw is not None else f"{source.hub} on the hub"


def _locate(folder: Path, name: str) -> Path:
    """The raw file or folder called ``name`` in a ``--local-dir``."""
    for path in (folder / f"{name}{suffix}" for suffix in ("", *SUFFIXES)):
        if path.exists():
            return path
    raise PrepareError(
        f"{folder} holds no {name}{{{','.join(SUFFIXES)}}} and no folder {name}; add it or name one file "
        f"with --local-file {name}=PATH"
    )


def _assignments(splits: Mapping[str, Source], local_files: list[str]) -> dict[str, Path]:
    assigned = {}
    for word in local_files:
        name, separator, path = word.partition("=")
        if not separator or name not in splits:
            raise PrepareError(f"--local-file {word} is not NAME=PATH with a NAME of {', '.join(splits)}; write it so")
        assigned[name] = Path(path).expanduser()
    return assigned


def main(recipe: str, splits: Mapping[str, Source]) -> None:
    """Command line of a recipe's ``prepare_data.py``: ``[NAME ...] [--out] [--local-dir] [--local-file NAME=PATH]``.

    Args:
        recipe: name of its folder; results go to ``~/data/<recipe>`` unless ``--out`` says otherwise.
        splits: name -> source. Exits with status 1 and one sentence where the data cannot be prepared.
    """

    def command(
        names: Annotated[list[str] | None, typer.Argument(help=f"splits: {', '.join(splits)} (all)")] = None,
        out: Annotated[Path, typer.Option(help="folder to write to")] = Path(f"~/data/{recipe}"),
        local_dir: Annotated[Path | None, typer.Option(help="folder of raw files named after the splits")] = None,
        local_file: Annotated[list[str] | None, typer.Option(help="NAME=PATH of one raw file; may repeat")] = None,
    ) -> None:
        try:
            assigned = _assignments(splits, local_file or [])
            for name in names or splits:
                if name not in splits:
                    raise PrepareError(f"{name} is not a split of {recipe}; choose from {', '.join(splits)}")
                raw = assigned.get(name) or (_locate(local_dir.expanduser(), name) if local_dir else None)
                output = out.expanduser() / f"{name}.parquet"
                typer.echo(f"{output}: {prepare(splits[name], output, raw)} problems")
        except PrepareError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error

    command.__doc__ = f"Write the data of recipes/{recipe} in verl's parquet schema."
    typer.run(command)
