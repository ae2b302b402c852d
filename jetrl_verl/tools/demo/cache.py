# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data and warmed-up policy of the demo, made once per configuration and kept in a folder.

The folder is named by a hash of all settings and of the code that uses them, once it is complete."""

import fcntl
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jetrl_verl.inputs import load_json, new_folder, reading, writing
from jetrl_verl.tools.demo import policy, task, warmup
from jetrl_verl.tools.demo.policy import PolicyConfig
from jetrl_verl.tools.demo.task import TaskConfig
from jetrl_verl.tools.demo.warmup import WarmupConfig
from jetrl_verl.tools.launch import say

LOCK = ".lock"
"""File of the cache that a process holds while it adds an entry; it stays, empty."""


@dataclass(frozen=True)
class Recipe:
    """All settings of a cache entry."""

    task: TaskConfig = field(default_factory=TaskConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that change with any setting and with the code that reads them."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for module in (task, policy, warmup):
            digest.update(Path(module.__file__).read_bytes())
        return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Prepared:
    """A complete cache entry. ``facts``: number of parameters, steps, seconds and accuracy of the warm-up."""

    folder: Path
    facts: dict

    policy = property(lambda self: self.folder / "policy")
    train = property(lambda self: self.folder / "train.parquet")
    test = property(lambda self: self.folder / "test.parquet")


def find(recipe: Recipe, cache: Path) -> Prepared | None:
    """The entry for ``recipe``, or None. Raises ``UserError`` if it is damaged."""
    folder = _folder(recipe, cache)
    with writing(cache, "--cache"):
        if not folder.exists():
            return None
    with reading(folder / "facts.json", "record of the warm-up", f"Delete {folder} and run again"):
        return Prepared(folder.resolve(), load_json(folder / "facts.json"))


def make(recipe: Recipe, cache: Path, device: str) -> Prepared:
    """Generate the data, warm the policy up on ``device`` and store both; wait for another process that is at it.

    Raises ``UserError`` if ``cache`` is not writable or the warm-up does not reach its target.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    with writing(cache, "--cache"):
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / LOCK).open("w")
    with lock:
        with writing(cache, "--cache"):  # some network file systems have no locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"warm-up: waiting for another process that fills {cache}")
                fcntl.flock(lock, fcntl.LOCK_EX)
        if (made := find(recipe, cache)) is not None:
            return made
        with new_folder(_folder(recipe, cache)) as building:
            facts = _fill(recipe, building, device)
            (building / "facts.json").write_text(json.dumps(facts, indent=2))
    return Prepared(_folder(recipe, cache).resolve(), facts)


def _fill(recipe: Recipe, folder: Path, device: str) -> dict:
    splits = task.make_splits(recipe.task)
    for split in ("train", "test"):
        task.write_parquet(splits[split], split, folder / f"{split}.parquet")
    say(f"data: {recipe.task.train} training and {recipe.task.test} held-out problems")

    tokenizer = policy.build_tokenizer()
    model = policy.build_model(recipe.policy, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"warm-up: {parameters:,} parameters, until about {recipe.warmup.target:.0%} of the problems come out right")
    facts = warmup.warm_up(model.to(device), tokenizer, splits["warmup"], recipe.warmup, say)
    policy.save_policy(model.cpu(), tokenizer, folder / "policy")
    say(f"warm-up: done after {facts['warmup_steps']} steps and {facts['warmup_seconds']} s")
    return {"parameters": parameters, **facts}


def _folder(recipe: Recipe, cache: Path) -> Path:
    return cache / f"demo-{recipe.key}"
