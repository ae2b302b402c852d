# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""patches/reach.json is what the tree reaches of verl, vLLM, Ray and Hydra, and their sources are the pinned ones."""

import importlib
import json
from pathlib import Path

import pytest

import jetrl_verl
from jetrl_verl.patches import all_patches, reach

PACKAGE = Path(jetrl_verl.__file__).parent
UPDATE = "run `python -m jetrl_verl.patches.reach --update` and look at the difference"


@pytest.fixture(scope="module")
def sources():
    return reach.Sources(reach.installed())


@pytest.fixture(scope="module")
def stored():
    return json.loads(reach.STORED.read_text())


def test_nothing_of_theirs_changed(stored, sources):
    states = reach.compare(stored, sources)
    changed = {place: state for place, state in states.items() if state != "unchanged"}
    assert not changed, reach.report(stored, changed)
    assert len(states) > 100


def test_every_use_is_listed(stored, sources):
    found = reach.collect(PACKAGE, sources)
    assert found == {place: entry["uses"] for place, entry in stored.items()}, UPDATE
    for patch in all_patches():
        assert f"replaced {patch.file}" in found[patch.replaces]


def test_overrides_by_python_itself_are_listed(stored, cpu_platform):
    """The method resolution order of classes that can be imported here, against what the source told."""
    seen = 0
    for name in ("rollout.worker", "rollout.sampler", "rollout.method", "targets.configs", "train.engine"):
        module = importlib.import_module(f"jetrl_verl.{name}")
        for value in list(vars(module).values()):
            if not isinstance(value, type) or not value.__module__.startswith("jetrl_verl."):
                continue
            ours = [base for base in value.__mro__ if base.__module__.startswith("jetrl_verl.")]
            theirs = [base for base in value.__mro__ if base.__module__.partition(".")[0] in reach.PROJECTS]
            for base in ours:
                for method, function in vars(base).items():
                    holder = next((other for other in theirs if method in vars(other)), None)
                    written = getattr(function, "__module__", None) == base.__module__ and "<" not in method
                    file = getattr(getattr(function, "__code__", None), "co_filename", "")
                    if holder is None or not written or not file.startswith(str(PACKAGE)):
                        continue  # also what @dataclass generates
                    seen += 1
                    assert f"{holder.__module__}:{holder.__qualname__}.{method}" in stored, UPDATE
    assert seen > 20


def test_a_new_override_and_a_new_private_name_are_found(sources, tmp_path):
    package = tmp_path / "jetrl_verl"
    package.mkdir()
    (package / "patches").mkdir()
    (package / "__init__.py").touch()
    (package / "new.py").write_text(
        "from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer\n"
        "from vllm import _custom_ops as ops\n"
        "class Ours:\n"
        "    def _select_prompt_uids(self, *args):\n"
        "        return self.poll_interval, ops.scaled_fp4_quant\n"
        "class Buffer(Ours, ReplayBuffer):\n"
        "    def sample(self, *args):\n"
        "        return super().sample(*args)\n"
    )
    found = reach.collect(package, sources)
    buffer = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"
    assert found[f"{buffer}.sample"] == ["overridden new.py"]
    assert f"{buffer}._select_prompt_uids" in found and f"{buffer}.poll_interval" in found
    assert found["vllm._custom_ops:scaled_fp4_quant"] == ["private new.py"]


def test_only_real_changes_are_named_and_by_our_file(stored, tmp_path):
    path = "trainer/ppo/v1/replay_buffer.py"
    theirs = reach.installed()["verl"]
    text = (theirs / path).read_text()
    copy = tmp_path / "verl" / path
    copy.parent.mkdir(parents=True)
    place = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll"
    only = {place: stored[place]}
    for new, state in (
        (text.replace("time.sleep(self.poll_interval)", "time.sleep( self.poll_interval )  # a comment"), "unchanged"),
        (text.replace("time.sleep(self.poll_interval)", "time.sleep(self.interval)"), "changed"),
        (text.replace("def _wait_for_next_poll", "def _wait"), "gone"),
    ):
        copy.write_text(new)
        states = reach.compare(only, reach.Sources({"verl": tmp_path / "verl"}))
        assert states == {place: state}
        named = f"  {state:9} replaced   {place}" in reach.report(only, states)
        assert named == (state != "unchanged")
