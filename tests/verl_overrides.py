# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What verl's own scripts pass, in sets that a seed draws and as whole scripts, and what a precision's driver says."""

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
import yaml
from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from tiny_models import save_policy

from jetrl_verl.config.composition import resolve
from jetrl_verl.config.hydra_plugin import unchecked
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.targets.job import JetCallback
from jetrl_verl.tools.demo import task

ENGINES = ("megatron", "mindspeed", "veomni", "torchtitan")
SENTENCE = re.compile(r"[^.]\S.*[^.]\. (Set|Check) .+\.")
_TABLE, _SCRIPTS = (
    yaml.load((Path(__file__).parent / name).read_text(), yaml.BaseLoader)
    for name in ("verl_values.yaml", "verl_scripts.yaml")
)
SCRIPTS = {
    "run_qwen2_5_32b_fsdp": ("qwen2", "qwen2.5-32b"),
    "ppo_trainer/run_qwen3_8b_fsdp": ("qwen3", "qwen3-8b"),
    "lora/run_qwen3_8b_from_adapter_fsdp": ("qwen3", "qwen3-8b"),
    "lora/run_qwen3_8b_merge_fsdp": ("qwen3", "qwen3-8b"),
    "run_qwen3_30b_a3b_fsdp": ("qwen3_moe", "qwen3-30b-a3b"),
    "run_qwen3_5_2b_openr1_fsdp": ("qwen3_5", "qwen3.5-2b"),
    "run_qwen3_5_27b_fsdp": ("qwen3_5", "qwen3.5-27b"),
    "run_qwen3_5_35b_fsdp": ("qwen3_5_moe", "qwen3.5-35b-a3b"),
    "run_qwen3_vl_8b_fsdp": ("qwen3_vl", "qwen3-vl-8b"),
    "run_qwen2_5_vl_7b_fsdp": ("qwen2_5_vl", "qwen2.5-vl-7b"),
    "lora/run_qwen2_5_vl_7b_fsdp": ("qwen2_5_vl", "qwen2.5-vl-7b"),
}
"""Scripts of verl whose words are in verl_scripts.yaml -> the family and the name of their model, as ``jetrl memory``
has it."""
WITH_IMAGES = (
    "run_qwen3_5_35b_fsdp",
    "run_qwen3_vl_8b_fsdp",
    "run_qwen2_5_vl_7b_fsdp",
    "lora/run_qwen2_5_vl_7b_fsdp",
)
"""Those whose jobs have images; the others' have text."""
_ENGINE_SHARE = 0.1


@dataclass(frozen=True)
class Draw:
    """Overrides of one to eight keys, and whether all of them are harmless."""

    words: tuple[str, ...]
    harmless: bool


def draws(count: int = 300, seed: int = 0) -> list[Draw]:
    """Every other set of harmless keys alone, the rest of all keys; one in ten of these for another engine.

    Call it where Hydra is initialized with verl's configuration: a key that it lacks is added with ``+``.
    """
    random, sets = Random(seed), []
    for i in range(count):
        harmless, pool, words = i % 2 == 0, dict(_values("harmless")), []
        if not harmless:
            pool |= dict(_values("others"))
            if random.random() < _ENGINE_SHARE:
                engine = random.choice(ENGINES)
                pool |= {key: values for key, values in _values("engines") if engine in key.split(".")}
                words = [f"model_engine={engine}"]
        known = _known_keys(*words)
        for key in random.sample(sorted(pool), random.randint(1, 8)):
            words.append(f"{'' if key in known else '+'}{key}={random.choice(pool[key])}")
        sets.append(Draw(tuple(words), harmless))
    return sets


def script_words(script: str) -> list[str]:
    """What one of ``SCRIPTS`` passes, without data, model and names."""
    return [f"{key}={value}" for key, value in _settings(script).items()]


def _settings(script: str) -> dict[str, str]:
    nodes = dict(_SCRIPTS[script])
    like = nodes.pop("like", None)
    own = {f"{node}.{leaf}": value for node, leaves in nodes.items() for leaf, value in leaves.items()}
    return (_settings(like) if like else {}) | own


def write_inputs(folder: Path, family: str = "qwen3") -> tuple[str, ...]:
    """What a user replaces in a script: paths of a small policy and of data, which are written here, and one device.

    The policy has as many positions as Qwen3, as scripts ask for 40,960 tokens, and fits up to eight GPUs. The data is
    text with an empty column of images.
    """
    fields = dict(max_position_embeddings=40960, intermediate_size=2048)
    fields |= dict(num_attention_heads=8, num_key_value_heads=8) if family == "qwen3" else {}
    policy, data = save_policy(folder / "policy", family, **fields), folder / "data.parquet"
    task.write_parquet(task.make_splits(task.TaskConfig(warmup=0, train=0, test=8))["test"], "test", data)
    rows = [row | {"images": []} for row in pyarrow.parquet.read_table(data).to_pylist()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    return (
        f"actor_rollout_ref.model.path={policy}",
        f"critic.model.path={policy}",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
    )


def driver_says(words: Iterable[str]) -> str:
    """Compose as Hydra does and run the driver's checks up to where Ray starts; the message of a refusal, or "".

    Raises:
        HydraException: verl has no such key or value.
    """
    groups = tuple(word for word in words if "." not in word.partition("=")[0])
    config = deepcopy(_composed(groups))
    values = OverridesParser.create().parse_overrides([word for word in words if word not in groups])
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    try:
        if resolve(config) is not None:
            JetCallback().on_job_start(config)
    except UnsupportedConfiguration as refusal:
        return str(refusal)
    except SystemExit as refusal:
        return str(refusal.code).removeprefix("jetrl_verl: ")
    return ""


@cache
def _composed(groups: tuple[str, ...]) -> DictConfig:
    """What sets with the same groups share: most of the time of composing."""
    with unchecked():
        return compose("ppo_trainer", overrides=list(groups))


def _values(section: str) -> Iterator[tuple[str, Any]]:
    for node, leaves in _TABLE[section].items():
        for leaf, values in leaves.items():
            yield f"{node}.{leaf}", values


@cache
def _known_keys(*words: str) -> set[str]:
    """Keys of verl's configuration with ``words``; none for an engine that its scripts name and it does not have."""
    try:
        return set(_keys(_composed(words)))
    except MissingConfigException:
        return set()


def _keys(node: DictConfig, above: str = "") -> Iterator[str]:
    for name in node:
        yield f"{above}{name}"
        if isinstance(child := node._get_node(name), DictConfig) and not child._is_none():
            yield from _keys(child, f"{above}{name}.")
