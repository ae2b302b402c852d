# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the demo prepares once and keeps: data and warmed-up policy, in a folder named after their configuration.

The folder's name holds a hash of every setting and of the source files that turn settings into data and weights, so an
entry is either exactly what this version of the code would make or it is not found. An entry is filled under another
name and renamed when complete; its manifest lists the checksum of each file, which makes damage visible in milliseconds
without importing torch.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jetrl_verl.tools.demo import DemoError, policy, task, warmup
from jetrl_verl.tools.demo.policy import PolicyConfig
from jetrl_verl.tools.demo.task import TaskConfig
from jetrl_verl.tools.demo.warmup import WarmupConfig

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a cache entry holds."""

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
    """A complete cache entry. ``facts`` tells how it was made: warm-up steps, accuracies, parameter count."""

    folder: Path
    facts: dict

    policy = property(lambda self: self.folder / "policy")
    train = property(lambda self: self.folder / "train.parquet")
    test = property(lambda self: self.folder / "test.parquet")


def find(recipe: Recipe, cache: Path) -> Prepared | None:
    """The entry for ``recipe``, or None. Raises ``DemoError``, naming the file, if the entry is damaged."""
    folder = _folder(recipe, cache)
    if not folder.exists():
        return None
    remedy = f"delete {folder} and run again"
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        checksums, facts = manifest["sha256"], manifest["facts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DemoError(f"the demo's cache entry has no readable {_MANIFEST}; {remedy}") from error
    for name, expected in checksums.items():
        path = folder / name
        if not path.is_file():
            raise DemoError(f"{path} is missing from the demo's cache; {remedy}")
        if _sha256(path) != expected:
            raise DemoError(f"{path} is damaged or was edited (its checksum differs); {remedy}")
    return Prepared(folder.resolve(), facts)


def make(recipe: Recipe, cache: Path, device: str, report: Callable[[str], None]) -> Prepared:
    """Generate the data, warm the policy up on ``device`` and store both; ``report`` receives lines for the user.

    Raises ``DemoError`` if ``cache`` cannot be written in or the warm-up does not reach its target.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # bars for loading 25 tensors would tear the lines reported here
    try:
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
    except OSError as error:
        raise DemoError(f"--cache {cache} is no folder to write in ({error.strerror}); name another") from None
    try:
        facts = _fill(recipe, building, device, report)
        checksums = {str(path.relative_to(building)): _sha256(path) for path in _files(building)}
        (building / _MANIFEST).write_text(json.dumps({"sha256": checksums, "facts": facts}, indent=2))
        building.rename(_folder(recipe, cache))
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Prepared(_folder(recipe, cache).resolve(), facts)


def _fill(recipe: Recipe, folder: Path, device: str, report: Callable[[str], None]) -> dict:
    splits = task.make_splits(recipe.task)
    for split in ("train", "test"):
        task.write_parquet(splits[split], split, folder / f"{split}.parquet")
    report(f"data: {recipe.task.train} training and {recipe.task.test} held-out problems")

    tokenizer = policy.build_tokenizer()
    model = policy.build_model(recipe.policy, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report(f"warm-up: {parameters:,} parameters, until about {recipe.warmup.target:.0%} of the problems come out right")

    def on_check(step: int, estimate: float) -> None:
        if step % (5 * recipe.warmup.check_every) == 0 or estimate >= recipe.warmup.target:
            report(f"warm-up: step {step}, estimated accuracy {estimate:.2f}")

    outcome = warmup.warm_up(model.to(device), tokenizer, splits["warmup"], recipe.warmup, on_check)
    policy.save_policy(model.cpu(), tokenizer, folder / "policy")
    model, tokenizer = policy.load_policy(folder / "policy")
    facts = {
        "parameters": parameters,
        "vocabulary": len(tokenizer),
        "warmup_steps": outcome["steps"],
        "warmup_seconds": round(outcome["seconds"], 1),
        "sampled_accuracy": warmup.sampled_accuracy(model, tokenizer, splits["test"]),
        "greedy_accuracy": warmup.sampled_accuracy(model, tokenizer, splits["test"], temperature=0.0),
    }
    report(
        f"warm-up: done after {facts['warmup_seconds']} s; held-out accuracy {facts['sampled_accuracy']:.2f} sampled, "
        f"{facts['greedy_accuracy']:.2f} greedy"
    )
    return facts


def _folder(recipe: Recipe, cache: Path) -> Path:
    return cache / f"demo-{recipe.key}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
