# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's cache: found only if it is exactly what would be made, damage named, nothing half-made left."""

import json
from dataclasses import replace

import pytest

from jetrl_verl.tools.demo import DemoError, cache
from jetrl_verl.tools.demo.cache import Recipe
from jetrl_verl.tools.demo.policy import PolicyConfig
from jetrl_verl.tools.demo.task import TaskConfig
from jetrl_verl.tools.demo.warmup import WarmupConfig

RECIPE = Recipe(
    task=TaskConfig(digits=2, warmup=64, train=8, test=4),
    policy=PolicyConfig(hidden_size=128, layers=1, heads=1, intermediate_size=128),
    warmup=WarmupConfig(target=1e-40, max_steps=10, batch_size=8, check_problems=8),
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    lines = []
    return folder, cache.make(RECIPE, folder, "cpu", lines.append), lines


@pytest.mark.parametrize(
    "changed",
    [
        replace(RECIPE, task=replace(RECIPE.task, seed=8)),
        replace(RECIPE, policy=replace(RECIPE.policy, layers=2)),
        replace(RECIPE, warmup=replace(RECIPE.warmup, lr=1e-3)),
    ],
)
def test_every_setting_changes_the_key(changed, tmp_path):
    assert changed.key != RECIPE.key


def test_code_changes_the_key(monkeypatch, tmp_path):
    edited = tmp_path / "task.py"
    edited.write_text("# another version\n")
    before = RECIPE.key
    monkeypatch.setattr(cache.task, "__file__", str(edited))
    assert RECIPE.key != before


def test_what_was_made_is_found(filled):
    folder, made, _ = filled
    found = cache.find(RECIPE, folder)
    assert found == made
    assert found.train.is_file() and found.test.is_file() and (found.policy / "config.json").is_file()
    assert found.facts["warmup_steps"] == 10
    assert 0 <= found.facts["sampled_accuracy"] <= 1
    assert cache.find(replace(RECIPE, task=replace(RECIPE.task, seed=8)), folder) is None


def test_only_complete_entries_are_left(filled, tmp_path, monkeypatch):
    folder, made, _ = filled
    assert [path.name for path in folder.iterdir()] == [made.folder.name]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.warmup, "warm_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.make(RECIPE, tmp_path, "cpu", lambda line: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        ("train.parquet", lambda path: path.write_bytes(path.read_bytes()[:-8])),
        ("policy/model.safetensors", lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:])),
        ("policy/tokenizer.json", lambda path: path.unlink()),
        ("manifest.json", lambda path: path.write_text("{")),
    ],
    ids=lambda damage: damage[0],
)
def test_damage_is_one_sentence_with_the_file(filled, damage):
    folder, made, _ = filled
    name, harm = damage
    path = made.folder / name
    intact = path.read_bytes()
    try:
        harm(path)
        with pytest.raises(DemoError) as error:
            cache.find(RECIPE, folder)
    finally:
        path.write_bytes(intact)
    message = str(error.value)
    assert name in message and "run again" in message and "\n" not in message
    assert cache.find(RECIPE, folder) == made


def test_manifest_lists_every_file(filled):
    _, made, _ = filled
    listed = json.loads((made.folder / "manifest.json").read_text())["sha256"]
    present = {str(path.relative_to(made.folder)) for path in made.folder.rglob("*") if path.is_file()}
    assert set(listed) == present - {"manifest.json"}
