# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's own scripts in the driver: 300 sets of their overrides under ``jet_fp8_exact``, and whole scripts."""

import json
import re
from functools import cache
from importlib.util import find_spec

import numpy as np
import pyarrow.parquet
import pytest
import ray
import transformers
from hydra.errors import HydraException
from safetensors.numpy import save_file
from tiny_models import WITH_TOWER
from verl_overrides import SCRIPTS, SENTENCE, draws, driver_says, script_words, write_inputs

import jetrl_verl.patches
from jetrl_verl.config import environment
from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.tools.memory.shapes import KNOWN

ACCEPTED_SHARE = 0.4
REMEDY = re.compile(r".*\. Set ([\w.]+)=([^\s,]+?)(?:,.*|\.)")


def cures(message: str, words: list[str]) -> bool:
    """Whether a set is no longer refused for the same reason once its user does what the sentence says."""
    if (remedy := REMEDY.fullmatch(message)) is None:
        return True
    key, value = remedy.groups()
    others = [word for word in words if word.lstrip("+").partition("=")[0] != key]
    try:
        return driver_says([*others, f"{'++' if '.' in key else ''}{key}={value}"]) != message
    except HydraException:
        return True  # what is left of the set is another engine's


@cache
def installed_states() -> list:
    """The state of patches: half of the driver's time, and the same in every test."""
    return list(jetrl_verl.patches.installed_states())


@pytest.fixture
def driver(compose, monkeypatch, tmp_path):
    """``driver_says`` for a job on a CPU, without a checkpoint, and with the state of patches asked once."""
    monkeypatch.chdir(tmp_path)  # resume_mode=auto looks for checkpoints/ here
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(ray, "init", ray.init)  # the driver wraps it
    states = installed_states()
    monkeypatch.setattr(jetrl_verl.patches, "installed_states", lambda: states)
    monkeypatch.setattr(transformers.utils, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(environment, "find_spec", lambda name: True if name == "qwen_vl_utils" else find_spec(name))


@pytest.mark.usefixtures("driver")
def test_sets_of_overrides_run_or_are_refused_in_one_sentence(tmp_path):
    inputs, accepted, bad = write_inputs(tmp_path), 0, []
    for draw in (sets := draws()):
        words = ["precision=jet_fp8_exact", *inputs, *draw.words]
        try:
            message = driver_says(words)
        except HydraException as error:
            # verl's own: its scripts name an engine that it does not have.
            with pytest.raises(type(error), match=re.escape(str(error).splitlines()[0])):
                driver_says(["precision=bf16", *words[1:]])
            continue
        accepted += not message
        named = any(word.partition("=")[0].rpartition(".")[2] in message for word in draw.words)
        if message and not (not draw.harmless and named and SENTENCE.fullmatch(message) and cures(message, words)):
            bad.append((draw.words, message))
    assert not bad
    assert accepted >= ACCEPTED_SHARE * len(sets)


def published(folder, name: str, **changes) -> str:
    """A folder with the configuration of a model of ``jetrl memory``, and a file in place of its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(KNOWN[name] | changes))
    save_file({"any": np.zeros(1)}, folder / "model.safetensors")
    return str(folder)


def text(folder, **columns) -> str:
    """A data file of a text, with further columns."""
    row = {"prompt": [{"role": "user", "content": "12+34="}], "images": [], "videos": []}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row | columns]), folder / "train.parquet")
    return str(folder / "train.parquet")


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("script", [script for script, (family, _) in SCRIPTS.items() if family == "qwen3_5"])
def test_scripts_for_qwen3_5_pass_with_text(tmp_path, script, precision):
    model = published(tmp_path / "model", SCRIPTS[script][1])
    data = text(tmp_path)
    words = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"data.val_files={data}"]
    assert driver_says([f"precision={precision}", *script_words(script), *words]) == ""


IMAGE = {"images": [{"bytes": b"PNG"}]}
SHARED = "jetrl.operations=shared"
"""What `auto` is on a Hopper GPU; on a CPU it is stock, which does not support a mixture."""


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("script", [script for script, (family, _) in SCRIPTS.items() if family in WITH_TOWER])
def test_scripts_pass_with_images_where_the_run_need_not_be_exact(tmp_path, monkeypatch, script):
    model, data = published(tmp_path / "model", SCRIPTS[script][1]), text(tmp_path, **IMAGE)
    inputs = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"data.val_files={data}"]
    words = [*script_words(script), *inputs, SHARED]
    assert driver_says(["precision=jet_fp8", *words]) == ""
    with monkeypatch.context() as without:
        without.setattr(environment, "find_spec", lambda name: name != "qwen_vl_utils" or None)
        assert driver_says(["precision=jet_fp8", *words]) == (
            "samples with images without qwen-vl-utils is not supported with precision=jet_fp8: verl reads them with "
            "it. Set up qwen-vl-utils."
        )
    message = driver_says(["precision=jet_fp8_exact", *words])
    assert message.startswith(f"the column images of {data} (data.train_files) is not supported with precision=")
    assert SENTENCE.fullmatch(message)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("words", "columns", "sentence"),
    [
        ((), {"videos": [{"video": "a.mp4"}]}, "the column videos of {data} (data.train_files) is not supported with"),
        (
            ("actor_rollout_ref.actor.strategy=fsdp_turbo", "actor_rollout_ref.ref.strategy=fsdp_turbo"),
            {},
            "actor_rollout_ref.actor.strategy=fsdp_turbo is not supported with",
        ),
    ],
    ids=["videos", "FSDP-Turbo"],
)
def test_what_qwen3_5_is_not_supported_with_is_refused_by_name(tmp_path, words, columns, sentence):
    model, data = published(tmp_path / "model", "qwen3.5-2b"), text(tmp_path, **columns)
    inputs = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"data.val_files={data}"]
    message = driver_says(["precision=jet_fp8", *script_words("run_qwen3_5_2b_openr1_fsdp"), *inputs, *words])
    assert message.startswith(sentence.format(data=data) + " precision=jet_fp8: ")
    assert SENTENCE.fullmatch(message)
