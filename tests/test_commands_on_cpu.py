# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every argument of every command with every kind of bad value: one sentence, status 1 or 2, no traceback.

Commands and arguments come from the parser, so that a new one without a row fails. :func:`accept` replaces what takes
long: a valid call gets there, a bad one must not."""

import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import typer
from safetensors.torch import load_file
from tiny_models import save_policy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from typer.testing import CliRunner

from jetrl_verl.algorithms.old_log_probs import Difference
from jetrl_verl.cli import app
from jetrl_verl.inputs import UserError
from jetrl_verl.patches import all_patches
from jetrl_verl.tools import launch
from jetrl_verl.tools.compare import run as compare
from jetrl_verl.tools.demo import cache
from jetrl_verl.tools.demo import run as demo
from jetrl_verl.tools.diff import run as diff
from jetrl_verl.tools.doctor import diagnosis

ACCEPTED = "every input was accepted"


def accept(*arguments, **options):
    raise UserError(ACCEPTED)


# --- bad values ------------------------------------------------------------------------------------------------------

Value = Callable[[Path, Path], object]
"""Makes a value of an argument, from the folder of valid inputs and an empty one."""

DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "missing": lambda path, content: None,
    "empty": lambda path, content: path.touch(),
    "truncated": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "binary": lambda path, content: path.write_bytes(bytes(range(256)) * 4),
    "not UTF-8": lambda path, content: path.write_bytes(b'{"prompt": "\xfc"}\n'),
    "a folder": lambda path, content: path.mkdir(),
    # Opens and cannot be read, by root either.
    "unreadable": lambda path, content: path.symlink_to("/proc/self/mem"),
    "a loop": lambda path, content: path.symlink_to(path),
}
"""What is wrong with a file -> puts that in its place; ``content`` is that of the valid file."""

JSON_DAMAGES = {
    text[:6]: functools.partial(lambda path, content, text: path.write_text(text), text=text)
    for text in ("{}", "[]", "[" * 10**5)
}


def texts(*values: str) -> dict[str, Value]:
    return {repr(value): functools.partial(lambda made, folder, value: value, value=value) for value in values}


def inside(source: str, *files: str, harmless: tuple[str, ...] = ()) -> dict[str, Value]:
    """A copy of the folder ``source`` with each of ``files`` damaged in each way but the ``harmless``."""

    def damaged(made: Path, folder: Path, file: str, damage: Callable) -> Path:
        given = made / "given"  # the same path each time, so that `composed_once` composes once
        shutil.rmtree(given, ignore_errors=True)
        shutil.copytree(made / source, given, copy_function=os.symlink)
        content = (given / file).read_bytes()
        (given / file).unlink()
        damage(given / file, content)
        return given / file if source == "files" else given

    return {
        f"{file} {name}": functools.partial(damaged, file=file, damage=damage)
        for file in files
        for name, damage in (DAMAGES | (JSON_DAMAGES if file.endswith(".json") else {})).items()
        if name not in harmless
    }


def damaged_file(file: str, harmless: tuple[str, ...] = ()) -> dict[str, Value]:
    return inside("files", file, harmless=harmless)


def a_file(made: Path, folder: Path) -> Path:
    (folder / "file").write_text("text")
    return folder / "file"


WRITTEN: dict[str, Value] = {
    "a file": a_file,
    "below a file": lambda made, folder: a_file(made, folder) / "below",
    "in /proc": lambda made, folder: "/proc/self/nothing",
    "long name": lambda made, folder: folder / ("x" * 300),
}
"""An output folder."""

NEW = WRITTEN | {"not empty": lambda made, folder: a_file(made, folder).parent}
"""An output folder that must not exist yet."""

READ = {name: WRITTEN[name] for name in ("a file", "below a file", "long name")} | {
    "missing": lambda made, folder: folder / "nothing",
    "empty": lambda made, folder: folder,
}
"""An input folder."""

NUMBER = texts("0", "-1", "nan", "inf", "1e309", "abc", "")
POSITIVE = NUMBER | texts("-0.5", "-inf")
NAME = texts("", "abc", "0", "nan")
FLAG: dict[str, Value] = {}
"""Takes no value; :func:`test_a_wrong_word_is_one_sentence` gives it one."""

WORDS = texts("abc", "a.b.c=1", "=", "trainer.nnodes=[", "trainer.nnodes=${nothing}", "precision=bf16")
"""Hydra overrides of verl's configuration."""

POLICY = ("config.json", "model.safetensors", "model.safetensors.index.json")
OF_A_RANK = tuple(f"global_step_3/actor/{name}_world_size_1_rank_0.pt" for name in ("model", "optim", "extra_state"))
OF_A_RUN = ("latest_checkpointed_iteration.txt", "global_step_3/actor/fsdp_config.json")

ROWS: dict[str, dict[str, dict[str, Value]]] = {
    "demo": {
        "precision": NAME, "steps": NUMBER, "out": WRITTEN, "device": NAME, "policy": NAME, "baseline": FLAG,
        "cache": WRITTEN | inside("cache", f"demo-{cache.Recipe().key}/facts.json", harmless=("{}",)),
        "context": texts("precision=bf16"),
    },
    "compare": {
        "precisions": NAME | texts(",", "bf16,bf16", "bf16+a"),
        "seeds": texts("", ",", "-1", "nan", "1e309", "abc", "1,,2", "1,1", "1.5"),
        "temperature": texts("-1", "nan", "inf", "1e309", "abc", ""),
        "samples": NUMBER | texts("2"), "steps": NUMBER, "device": FLAG, "cache": FLAG,
        "out": WRITTEN | inside("comparison", "job.json", "runs/bf16-seed1/run.json", "runs/bf16-seed1/metrics.jsonl",
                                "scores-0-1.json", harmless=("missing", "a loop", "{}")),
        "context": texts("no-such-program"),
    },
    "doctor": {"ray": FLAG, "as_json": FLAG},
    "memory": {
        "script": damaged_file("recipe.sh"),
        "model": READ | inside("model", "config.json"),
        "gpus": NUMBER | texts("3"), "tp": NUMBER | texts("3"),
        "prompt_length": NUMBER, "response_length": NUMBER, "gpu_gib": POSITIVE,
        "context": {name: make for name, make in WORDS.items() if "precision" not in name}
        | texts("trainer.nnodes=0", "data.train_batch_size=abc", "trainer.n_gpus_per_node=nan"),
    },
    "diff": {
        "model": READ | inside("model", *POLICY[:2], "tokenizer.json"),
        "precision": NAME | texts(","), "limit": NUMBER, "response": NUMBER, "temperature": POSITIVE,
        "prompts": damaged_file("prompts.txt", harmless=("truncated", "binary"))
        | damaged_file("prompts.jsonl") | damaged_file("prompts.parquet"),
        "sequence": damaged_file("sequence.json"), "out": WRITTEN,
        "context": WORDS | texts("actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
    },
    "export": {
        "checkpoint": READ | inside("model", *POLICY[:2]) | inside("model", POLICY[2], harmless=("missing", "a loop"))
        | inside("run", *OF_A_RUN, OF_A_RANK[0], "global_step_3/actor/huggingface/config.json"),
        "out": NEW, "format": NAME, "scale_rule": NAME, "unfit_layers": NAME, "tensor_parallel": NUMBER,
    },
    "reshard": {
        "checkpoint": READ | inside("run", *OF_A_RUN, OF_A_RANK[0])
        | inside("run", *OF_A_RANK[1:], harmless=("missing",)),
        "gpus": NUMBER | texts("1"), "out": NEW,
    },
    "patch": {
        "into": READ | inside("checkout", "verl/trainer/ppo/v1/replay_buffer.py"), "dry_run": FLAG,
    },
}  # fmt: skip
"""Command -> argument -> kind of bad value -> makes it; ``context`` are the words that are passed on to verl."""

VALID: dict[str, dict[str, str | None]] = {
    "demo": {"out": "out", "cache": "cache", "device": "cpu"},
    "compare": {"precisions": "bf16", "out": "comparison", "context": "true"},
    "doctor": {},
    "memory": {"model": "model"},
    "diff": {"model": "model", "out": "out", "response": "8"},
    "export": {"checkpoint": "model", "out": "out"},
    "reshard": {"checkpoint": "run", "gpus": "2", "out": "out"},
    "patch": {"into": "checkout", "dry_run": None},
}
"""Command -> arguments of a call that works; the names of valid inputs stand for their paths, and a flag has None."""

COMMANDS = typer.main.get_command(app).commands


def call(command: str, made: Path, folder: Path, **changed: object):
    """Run a command in this process with the arguments of ``VALID`` and ``changed``."""
    words, passed_on = [command], []
    values = {
        name: made / value if value and (made / value).exists() else value for name, value in VALID[command].items()
    }
    if values.get("out") == "out":
        values["out"] = folder / "new"
    values |= changed
    if "script" in changed:
        del values["model"]
    options = {parameter.name: parameter.opts for parameter in COMMANDS[command].params}
    for name, value in values.items():
        if name == "context":
            passed_on = ["--", str(value)]
        elif options[name][0].startswith("-"):
            words += [options[name][0], *([] if value is None else [str(value)])]
        else:
            words.append(f"{value}")
    return CliRunner().invoke(app, [*words, *passed_on])


# --- valid inputs ----------------------------------------------------------------------------------------------------


def save_run(root: Path, weights: dict[str, torch.Tensor]) -> None:
    """The checkpoints of verl on one rank, as FSDP2 shards them."""
    actor = root / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("fsdp",), _init_backend=False, _rank=0)

    def sharded(tensor: torch.Tensor) -> DTensor:
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        return DTensor(tensor, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)

    states = {
        "model": {name: sharded(tensor.float()) for name, tensor in weights.items()},
        "optim": {"state": {0: {"exp_avg": sharded(torch.ones(4))}}, "param_groups": [{"lr": 0.1}]},
        "extra_state": {"lr_scheduler": {"last_epoch": 3}},
    }
    for name, state in states.items():
        torch.save(state, actor / f"{name}_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    (root / "latest_checkpointed_iteration.txt").write_text("3")


def save_comparison(root: Path) -> None:
    """A comparison of one run that has finished and is scored."""
    run = root / "runs" / "bf16-seed1"
    run.mkdir(parents=True)
    (root / "job.json").write_text('["true"]')
    (run / "run.json").write_text('{"precision": "bf16"}')
    (run / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    for folder in (root, run):
        (folder / "scores-0-1.json").write_text('{"scores": [[1.0], [0.0]]}')


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made")
    save_policy(root / "model", "qwen3")
    weights = load_file(root / "model" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (root / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_run(root / "run", weights)
    shutil.copytree(root / "model", root / "run" / "global_step_3" / "actor" / "huggingface")
    save_comparison(root / "comparison")
    entry = root / "cache" / f"demo-{cache.Recipe().key}"
    entry.mkdir(parents=True)
    (entry / "facts.json").write_text("{}")
    files = root / "files"
    files.mkdir()
    (files / "recipe.sh").write_text('$PYTHON -m verl.trainer.main_ppo "actor_rollout_ref.model.path=qwen3-8b"\n')
    Difference([1], [2], [1], [-0.5], [-0.6], 0, 1, 1).save(files / "sequence.json")
    (files / "prompts.txt").write_text("1+1\n")
    (files / "prompts.jsonl").write_text('{"prompt": "1+1"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1"]}), files / "prompts.parquet")
    (source,) = importlib.util.find_spec("verl").submodule_search_locations
    for path in {"verl/__init__.py", *(patch.path for patch in all_patches() if patch.project == "verl")}:
        (root / "checkout" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(source).parent / path, root / "checkout" / path)
    return root


@pytest.fixture(scope="module")
def composed_once():
    """verl's configuration takes a second, and depends on the overrides alone."""
    kept = functools.cache(launch.compose)
    return lambda words, *checked: kept(tuple(words), *checked)


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path, composed_once):
    for module in (launch, diff):
        monkeypatch.setattr(module, "compose", composed_once)
    for module, name in ((demo, "_train"), (cache, "_fill"), (diff, "run_engine"), (diagnosis, "diagnose")):
        monkeypatch.setattr(module, name, accept)
    monkeypatch.setattr(compare, "train", lambda run, *_: None if run.finished else accept())
    monkeypatch.chdir(tmp_path)


# --- tests -----------------------------------------------------------------------------------------------------------


def test_every_argument_has_a_row():
    functions = {info.name or info.callback.__name__: info for info in app.registered_commands}
    expected = {
        name: {parameter.name for parameter in COMMANDS[name].params if parameter.name != "help"}
        | ({"context"} if info.context_settings and info.context_settings.get("allow_extra_args") else set())
        for name, info in functions.items()
    }
    assert {name: set(row) for name, row in ROWS.items()} == expected and ROWS.keys() == VALID.keys()


@pytest.mark.parametrize("command", VALID)
def test_the_valid_call_is_accepted(command, made, tmp_path):
    result = call(command, made, tmp_path)
    assert result.exit_code == 0 or ACCEPTED in result.stderr, result.output


CASES = [
    pytest.param(command, argument, make, id=f"{command}-{argument}-{kind}")
    for command, row in ROWS.items()
    for argument, kinds in row.items()
    for kind, make in kinds.items()
]


@pytest.mark.parametrize(("command", "argument", "make"), CASES)
def test_a_bad_value_is_one_sentence(command, argument, make, made, tmp_path):
    value = make(made, tmp_path)
    sentence = check(call(command, made, tmp_path / "out", **{argument: value}))
    names = {argument, argument.replace("_", "-"), argument.upper(), str(value), repr(value), *str(value).split("=")}
    names |= {"overrides"} if argument == "context" else {"Install verl"} if argument == "into" else set()
    assert any(name in sentence for name in names - {""}), f"it does not name the input: {sentence}"


WRONG_WORDS = [
    ["nothing"],
    *([name, "--nothing"] for name in COMMANDS),
    *([name] for name in ("export", "reshard", "diff")),
    *([name, "a", "b", "c"] for name in ("export", "reshard", "patch", "doctor")),
    ["demo", "--baseline=1"], ["doctor", "--ray=no"], ["doctor", "--json=1"], ["patch", "--dry-run=1"],
    ["demo", "--steps"], ["compare", "--device", "tpu"],
    ["compare", "--cache", "/proc/self/nothing", "--device", "cpu"], ["memory"],
    ["compare", "--", "python3", "-m", "verl", "+data.seed=4"], ["compare", "--precisions", "bf16+data.seed=1"],
    ["reshard", "hdfs://a/global_step_3", "--gpus", "3"], ["reshard", "a", "--gpus", "3", "--out", "s3://b"],
]  # fmt: skip


@pytest.mark.parametrize("words", WRONG_WORDS, ids=" ".join)
def test_a_wrong_word_is_one_sentence(words):
    check(CliRunner().invoke(app, words))


def test_an_interruption_ends_quietly(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnosis, "diagnose", interrupted)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 130 and result.output == ""


@pytest.mark.parametrize("words", ["patch", "patch --dry-run --into checkout"])
def test_a_closed_pipe_ends_quietly(words, made):
    command = f"({shlex.join([sys.executable, '-m', 'jetrl_verl.cli'])} {words}; echo $? >&2) | true"
    run = subprocess.run(command, shell=True, cwd=made, capture_output=True, text=True)
    assert run.stderr.strip() == "1", run.stderr


def check(result) -> str:
    """The sentence: what is wrong and what to do, on one line, with a status that says so."""
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2) and ACCEPTED not in result.stderr, result.output
    assert re.fullmatch(r"error: [^\n]+[.;] [^\n]+\.\n", result.stderr), result.stderr
    return result.stderr
