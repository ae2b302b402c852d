# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""scripts/reach.json lists every name of verl, vLLM, Ray and Hydra in use, and their sources are the pinned ones."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import reach

import jetrl_verl
from jetrl_verl.patches import all_patches
from jetrl_verl.patches.patch import VERSIONS
from jetrl_verl.patches.source import names_bound_by

PACKAGE = Path(jetrl_verl.__file__).parent
UPDATE = "run `python scripts/reach.py --update` and look at the difference"


@pytest.fixture(scope="module")
def sources():
    return reach.Sources(reach.installed())


@pytest.fixture(scope="module")
def stored():
    """The lists of the installed versions."""
    return reach.joined(reach.stored_lists(), map(reach.installed_version, reach.installed()))


def test_sources_in_reach_are_the_pinned_ones(stored, sources):
    states = reach.compare(stored, sources)
    changed = {place: state for place, state in states.items() if state != "unchanged"}
    assert not changed, reach.report(stored, changed)
    assert len(states) > 100


def test_every_use_is_listed(stored, sources):
    assert reach.listed(PACKAGE, sources) == stored, UPDATE
    for patch in all_patches():
        assert f"replaced {patch.file}" in stored[patch.replaces]["uses"]


def test_every_known_version_has_a_list():
    names = {f"{project} {version}" for project, versions in VERSIONS.items() for version in versions}
    assert names <= reach.stored_lists().keys()


def test_every_private_attribute_is_listed_or_of_another_project():
    lists = reach.stored_lists()
    uses = [(place, entry["uses"]) for places in lists.values() for place, entry in places.items()]
    unlisted = reach.unlisted(PACKAGE, uses)
    assert not unlisted, f"name each in the {reach.TABLE} of its file, or its owner in reach.ELSEWHERE: {unlisted}"


def test_names_in_the_tables_exist_and_are_used(sources):
    named, both = 0, reach.Sources({PACKAGE.name: PACKAGE, **sources.folders})
    for where, module in reach.files_of(PACKAGE, both):
        tree = module.tree
        rest = ast.unparse([node for node in tree.body if reach.TABLE not in names_bound_by(node)])
        words = set(re.findall(r"\w+", rest))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and module.table]
        bases = {definition.name for node in classes for _, definition in both.ancestors(module, node)}
        for place in module.table:
            named += 1
            assert any(place in places for places in reach.stored_lists().values()), f"{where}: {place} is not there"
            # Subclassing a class uses all its methods.
            name = place.partition(":")[2].split(".")
            assert name[-1] in words or name[0] in bases, f"{where} does not use {place}"
        assert len(set(module.table)) == len(module.table), where
    assert named > 30


def test_private_attributes_of_other_projects_exist():
    """Every listed attribute is in use and is where the list says."""
    assert set(reach.ELSEWHERE) <= reach.asked_for(PACKAGE)
    for name, owner in reach.ELSEWHERE.items():
        module, _, holder = owner.partition(":")
        imported = importlib.import_module(module)
        written = re.search(rf"\b{name}\b", Path(imported.__file__).read_text())
        assert hasattr(getattr(imported, holder), name) or written, f"{owner} has no {name}"
        assert module.partition(".")[0] not in reach.PROJECTS


def test_overrides_in_the_method_resolution_order_are_listed(stored, cpu_platform):
    """The method resolution order of importable classes agrees with what the source shows."""
    seen = 0
    for name in ("rollout.worker", "rollout.sampler", "rollout.method", "targets.configs", "train.engine"):
        module = importlib.import_module(f"jetrl_verl.{name}")
        for value in list(vars(module).values()):
            if not isinstance(value, type) or not value.__module__.startswith("jetrl_verl."):
                continue
            own = [base for base in value.__mro__ if base.__module__.startswith("jetrl_verl.")]
            upstream = [base for base in value.__mro__ if base.__module__.partition(".")[0] in reach.PROJECTS]
            for base in own:
                for method, function in vars(base).items():
                    holder = next((other for other in upstream if method in vars(other)), None)
                    written = getattr(function, "__module__", None) == base.__module__ and "<" not in method
                    file = getattr(getattr(function, "__code__", None), "co_filename", "")
                    if holder is None or not written or not file.startswith(str(PACKAGE)):
                        continue  # also what @dataclass generates
                    seen += 1
                    assert f"{holder.__module__}:{holder.__qualname__}.{method}" in stored, UPDATE
    assert seen > 20


def test_a_new_override_and_a_new_private_name_are_collected(sources, tmp_path):
    package = tmp_path / "jetrl_verl"
    package.mkdir()
    (package / "patches").mkdir()
    (package / "__init__.py").touch()
    (package / "new.py").write_text(
        "from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer\n"
        "from vllm import _custom_ops as ops\n"
        "class Mixin:\n"
        "    def _select_prompt_uids(self, *args):\n"
        "        return self.poll_interval, ops.scaled_fp4_quant\n"
        "class Buffer(Mixin, ReplayBuffer):\n"
        "    def sample(self, *args):\n"
        "        return super().sample(*args)\n"
    )
    uses = reach.collect(package, sources)
    buffer = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"
    assert uses[f"{buffer}.sample"] == ["overridden new.py"]
    assert f"{buffer}._select_prompt_uids" in uses and f"{buffer}.poll_interval" in uses
    assert uses["vllm._custom_ops:scaled_fp4_quant"] == ["private new.py"]


def test_a_private_attribute_is_unlisted_until_its_file_names_it(sources, tmp_path):
    package = tmp_path / "jetrl_verl"
    (package / "patches").mkdir(parents=True)
    (package / "__init__.py").touch()
    place = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll"
    source = (
        "from vllm import _custom_ops as ops\n"
        "class Ours:\n"
        "    _own: int = 0\n"
        "    def wait(self, buffer, other):\n"
        "        buffer._wait_for_next_poll()\n"
        "        setattr(other, '_written', 1)\n"
        "        return self._own, other._own, super()._above, ops._reached, other._replace()\n"
    )
    (package / "new.py").write_text(source)
    (package / "second.py").write_text("def read(other):\n    return other._own\n")
    expected = {
        "_wait_for_next_poll": ["new.py:5"],
        "_written": ["new.py:6"],
        "_above": ["new.py:7"],
        "_own": ["second.py:2"],
    }
    assert reach.unlisted(package, reach.collect(package, sources).items()) == expected
    (package / "new.py").write_text(f"{source}REACHES = ({place!r},)\n")
    del expected["_wait_for_next_poll"]
    uses = reach.collect(package, sources)
    assert reach.unlisted(package, uses.items()) == expected
    assert uses[place] == ["private new.py"]


def test_only_real_changes_are_reported(stored, tmp_path):
    path = "trainer/ppo/v1/replay_buffer.py"
    text = (reach.installed()["verl"] / path).read_text()
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
