# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's cache: an entry is used for its own settings and code only, and every entry is complete."""

from dataclasses import replace

import pytest

from jetrl_verl.tools.demo import cache
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
    return folder, cache.make(RECIPE, folder, "cpu", lambda line: None)


@pytest.mark.parametrize(
    "changed",
    [
        replace(RECIPE, task=replace(RECIPE.task, seed=8)),
        replace(RECIPE, policy=replace(RECIPE.policy, layers=2)),
        replace(RECIPE, warmup=replace(RECIPE.warmup, lr=1e-3)),
    ],
)
def test_every_setting_changes_the_key(changed):
    assert changed.key != RECIPE.key


def test_code_changes_the_key(monkeypatch, tmp_path):
    edited = tmp_path / "task.py"
    edited.write_text("# another version\n")
    before = RECIPE.key
    monkeypatch.setattr(cache.task, "__file__", str(edited))
    assert RECIPE.key != before


def test_an_entry_is_used_for_its_own_recipe_only(filled):
    folder, made = filled
    entry = cache.find(RECIPE, folder)
    assert entry == made and entry.facts["warmup_steps"] == RECIPE.warmup.check_every
    assert entry.train.is_file() and entry.test.is_file() and (entry.policy / "config.json").is_file()
    assert cache.find(replace(RECIPE, task=replace(RECIPE.task, seed=8)), folder) is None


def test_an_interrupted_warm_up_leaves_no_entry(filled, tmp_path, monkeypatch):
    folder, made = filled
    assert [path.name for path in folder.iterdir()] == [made.folder.name]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.warmup, "warm_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.make(RECIPE, tmp_path, "cpu", lambda line: None)
    assert list(tmp_path.iterdir()) == []
