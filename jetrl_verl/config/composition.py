# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a composed configuration once, on the driver, as Hydra composes it: validates the options, refuses what the
table of support lists, decides ``jetrl.operations=auto``, and writes the job back as the ``jetrl`` node.

Only what the shared operations cannot do makes ``auto`` ``stock``; what merely parts the last bits does not.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from jetrl_verl.formats.catalog import CACHES, FORMATS, SCALE_RULES, TRAINED, UNQUANTIZED

from .attention import chosen_attentions, flash_attention_runs, no_flash_attention
from .data import find_media
from .hopper_kernels import CHOSEN_BACKWARD
from .installed import installed_version, on_cpu
from .job import Job
from .model import overrides_of_both, overrides_of_trainer, read_model
from .options import PRECISIONS, JetConfig
from .support.limits import PINS
from .support.operations import NOTE_ROWS
from .support.options import OPTION_ROWS
from .support.row import Get, UnsupportedConfiguration, shown
from .support.scopes import ADAPTERS, BUCKET, CORRECTION, MODEL, ROLLOUT, TENSOR_PARALLEL, TRAINER_MODE, VLLM
from .support.table import TABLE, inexact_because, losses, refusals, stock_because
from .vllm_plugins import replacements
from .workers import answer_here, without_kernels

_CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": PRECISIONS[1:],
    "train": (*TRAINED, UNQUANTIZED),
    "rollout": (*FORMATS, UNQUANTIZED),
    "scale_rule": SCALE_RULES,
    "backward": ("auto", *TRAINED, UNQUANTIZED),
    "unfit_layers": ("stop", "skip"),
    "ref": (UNQUANTIZED, *TRAINED),
    "critic": (UNQUANTIZED, *TRAINED),
    "contract_check": (True, False),
    "metrics": (True, False),
    "operations": ("auto", "stock", "shared"),
    "int8_scales": ("sync", "first"),
    "clip": ("fixed", "calibrated"),
    "correction": ("fixed", "adaptive"),
    "old_log_probs": ("compute", "rollout"),
    "kv_cache": tuple(CACHES),
    "gathered": ("pass", "batch"),
    "checkpointing": ("auto", "full", "selective"),
}
_POSITIVE: dict[str, Any] = {"clip_interval": int, "correction_scale": int | float, "invariant_scaling": int | float}


def resolve(config: DictConfig) -> Job | None:
    """The job of a composed config, which is also written back as its ``jetrl`` node.

    Returns:
        None for a config without that node (``precision=bf16``, or stock verl): it is verl's alone.

    Raises:
        UnsupportedConfiguration: the config cannot run.
    """
    if OmegaConf.select(config, "jetrl") is None:
        return None
    options, get = parse(config.jetrl), reader(config)
    if chosen := chosen_attentions(get):
        for key, name in chosen.items():
            OmegaConf.update(config, key, name, force_add=True)
        settings = ", ".join(f"{key}={name}" for key, name in chosen.items())
        _say(f"jetrl_verl: note: {no_flash_attention()}, so the plugin sets {settings}.")
    for message in refusals(get):
        raise UnsupportedConfiguration(message)
    if options.backward == "auto":
        options = replace(options, backward=UNQUANTIZED if _bf16_backward_pays(options, get) else JetConfig.backward)
        if options.backward == UNQUANTIZED:
            _say(f"jetrl_verl: note: {CHOSEN_BACKWARD}")
    images = images_of(get)
    if images and options.precision == "jet_fp8_exact":
        raise UnsupportedConfiguration(TABLE["exact_images"].message(get, what=images))
    why_stock = _why_stock(options, get)
    inexact = () if options.train == UNQUANTIZED else (*why_stock, *inexact_because(get))
    if images and options.train != UNQUANTIZED:
        inexact += (TABLE["exact_images"].loss(what=images),)
    if options.operations == "auto":
        options = replace(options, operations="stock" if why_stock else "shared")
        _refuse_contradictions(options)
    versions = {package: installed_version(package) for package in PINS}
    ranks, bucket = get(TENSOR_PARALLEL) or 1, get(BUCKET) or Job.bucket_megabytes
    overrides = overrides_of_both(get)
    job = Job(options, inexact, ranks, versions, flash_attention_runs(get), bucket, overrides, bool(images))
    for line in _start_lines(job, get):
        _say(f"jetrl_verl: {line}")
    OmegaConf.update(config, "jetrl", job.as_dict(), merge=False, force_add=True)
    if options.old_log_probs == "rollout":
        # verl's own switch; what it does not do, the check, comes with the rollout's config.
        OmegaConf.update(config, f"{CORRECTION}.bypass_mode", True)
    _raise_batched_tokens(config, get)
    _merge_adapters(config, get)
    if job.shared:
        _drop_fused_kernels(config, get)
    return job


def images_of(get: Get) -> str:
    """Where samples may have images, in words; empty if they have none. vLLM's ``language_model_only`` says it of data
    that the driver cannot read."""
    only_text = get(key := f"{VLLM}.language_model_only")
    try:
        seen = find_media(get, images=True)
    except UnsupportedConfiguration:  # a file that the job's start refuses
        seen = ""
    if only_text and seen:
        words = {"key": key, "value": "true", "why": f"{seen} has some"}
        raise UnsupportedConfiguration(TABLE["vision_tower"].message(get, **words))
    return seen if only_text is None else "" if only_text else f"{key}=false"


def _raise_batched_tokens(config: DictConfig, get: Get) -> None:
    """Raise ``max_num_batched_tokens`` to ``max_num_seqs``, below which vLLM refuses to start.

    verl itself raises it to the longest request where chunked prefill is off (targets/configs.py).
    """
    key = f"{ROLLOUT}.max_num_batched_tokens"
    tokens, sequences = get(key), get(f"{ROLLOUT}.max_num_seqs")
    if tokens is not None and sequences is not None and tokens < sequences:
        OmegaConf.update(config, key, sequences)
        why = "since vLLM needs a token for each of max_num_seqs"
        _say(f"jetrl_verl: note: {key} is {sequences} instead of {tokens}, {why}.")


def _merge_adapters(config: DictConfig, get: Get) -> None:
    """Set verl's switch for merged LoRA adapters: its own default is an adapter of vLLM."""
    key = f"{MODEL}.lora.merge"
    if ADAPTERS.applies(get) and not get(key):
        OmegaConf.update(config, key, True, force_add=True)
        why = "since both sides multiply with the quantized sum of weight and adapter"
        _say(f"jetrl_verl: note: {key} is true instead of false, {why}.")


def _drop_fused_kernels(config: DictConfig, get: Get) -> None:
    """Unset verl's fused kernels: shared operations have log-probabilities of their own, in chunks of rows as well."""
    key = f"{MODEL}.use_fused_kernels"
    if get(key):
        OmegaConf.update(config, key, False)
        why = "since the shared operations compute the log-probabilities, in chunks of rows as well"
        _say(f"jetrl_verl: note: {key} is false instead of true, {why}.")


def parse(node: Mapping[str, Any]) -> JetConfig:
    """The options of a ``jetrl`` node: the only place that validates them.

    Raises:
        UnsupportedConfiguration: a key or value that does not exist, or a combination without a meaning.
    """
    known = [option.name for option in fields(JetConfig)]
    for key in node:
        if key not in (*known, "job"):  # `job` is of an earlier resolution, as in the saved config of a run
            raise UnsupportedConfiguration(
                f"jetrl.{key} is not supported with any precision: there is no such option. Set one of "
                f"{', '.join(known)}."
            )
    if any(name not in node for name in ("precision", "train", "rollout")):
        raise UnsupportedConfiguration(
            "an option of the jetrl node is not supported with precision=bf16. Set precision="
            f"<{'|'.join(PRECISIONS[1:])}>."
        )
    options = JetConfig(**{name: node[name] for name in known if name in node})
    for name, choices in _CHOICES.items():
        value = getattr(options, name)
        # `1 in (True, False)` holds in Python; the type has to agree too.
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise _no_value(name, value, f"one of {', '.join(map(shown, choices))}")
    for name, kind in _POSITIVE.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < float("inf"):
            raise _no_value(name, value, "a positive number")
    _refuse_contradictions(options)
    return options


def _refuse_contradictions(options: JetConfig) -> None:
    for message in refusals(lambda key: getattr(options, key.removeprefix("jetrl.")), OPTION_ROWS):
        raise UnsupportedConfiguration(message)


def _no_value(name: str, value: Any, choices: str) -> UnsupportedConfiguration:
    return UnsupportedConfiguration(
        f"jetrl.{name}={shown(value)} is not supported with any precision. Set jetrl.{name} to {choices}."
    )


def _start_lines(job: Job, get: Get) -> Iterator[str]:
    """Whether the two sides agree in every bit, and what the user loses; nothing about exactness of a baseline."""
    if job.bit_equal:
        if get(TRAINER_MODE) in (None, "sync"):
            yield "exact: log-probabilities of rollout and trainer agree in every bit, so k3_kl is 0."
        else:
            yield (
                "exact: log-probabilities of tokens that the current weights sampled agree in every bit, so "
                "rollout_corr/lag_0/k3_kl is 0; tokens of older weights are counted by lag."
            )
    for sentence in job.inexact:
        yield f"exactness is OFF: {sentence}"
    for sentence in losses(get, NOTE_ROWS):
        yield f"note: {sentence}"


@cache
def _hopper_without_kernels() -> bool:
    """Whether this machine has Hopper GPUs and the package lacks the kernels for them."""
    return bool(without_kernels({"here": answer_here()}))


def _bf16_backward_pays(options: JetConfig, get: Get) -> bool:
    """Whether DGrad and WGrad are faster in BF16: of a dense model on this machine's Hopper GPUs without the kernels.

    A driver without a GPU cannot know; ``workers`` then names the nodes and the setting.
    """
    from jetrl_verl.models import Unsupported

    if on_cpu() or options.train == UNQUANTIZED or not _hopper_without_kernels():
        return False
    try:
        model = read_model(get(f"{MODEL}.path"))
        return model is not None and model.family.experts is None
    except (Unsupported, UnsupportedConfiguration):  # refused later, with a sentence
        return False


def _why_stock(options: JetConfig, get: Get) -> list[str]:
    """Why ``auto`` is ``stock``, a sentence for each thing that the shared operations do not cover."""
    if options.operations != "auto":
        return []
    if options.train == UNQUANTIZED:
        return [TABLE["operations_of_a_baseline"].reason]
    return list(stock_because(get)) or list(_uncovered(options, get))


def _uncovered(options: JetConfig, get: Get) -> Iterator[str]:
    """What the shared operations do not cover of the machine, or of the model as far as it is read without a copy."""
    from jetrl_verl.models import Unsupported

    from .built import check_built

    if on_cpu():
        yield TABLE["cpu"].loss(what="VERL_PLATFORM=cpu")
        return
    path = get(f"{MODEL}.path")
    try:
        if (model := read_model(path)) is not None:
            model = model.changed(overrides_of_trainer(get))
            config = model.config
            for error in model.family.uncovered_operations(config):
                yield TABLE[error.row].loss(what=f"the model {path}", why=str(error))
            check_built(replace(options, operations="shared"), path, config)
            for words in replacements(config):
                yield TABLE["vllm_plugins"].loss(**words)
    except Unsupported as error:
        yield TABLE[error.row].loss(what=f"the model {path}", why=str(error))
    except UnsupportedConfiguration as error:  # of a model that no precision can run, refused before the job
        yield str(error)


@cache
def _say(line: str) -> None:
    """Once per process: Hydra composes a config twice before a run."""
    print(line, file=sys.stderr, flush=True)


def reader(config: DictConfig) -> Get:
    """Callable that reads a composed config; an argument of vLLM given as JSON is read like the mapping."""

    def get(key: str) -> Any:
        """Value at a dotted path as plain Python; ``None`` where a part is absent or still ``???``."""
        if not f"{key}.".startswith(f"{VLLM}."):
            return _plain(OmegaConf.select(config, key))
        arguments = _plain(OmegaConf.select(config, VLLM))
        value = None
        if isinstance(arguments, Mapping):
            value = {name: _parsed(argument) for name, argument in arguments.items()}
        for name in filter(None, key.removeprefix(VLLM).split(".")):
            value = value.get(name) if isinstance(value, Mapping) else None
        return None if value == "???" else value

    return get


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def _parsed(argument: Any) -> Any:
    """The mapping or list that an argument is the JSON of, else the argument."""
    if isinstance(argument, str) and argument.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(argument)
        except ValueError:
            pass
    return argument
