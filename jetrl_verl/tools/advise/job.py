# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What is asked for: a job's sizes, from options of the command or from verl's composed configuration."""

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jetrl_verl.config.support.row import Get
from jetrl_verl.config.support.scopes import ACTOR, ATTENTION, MODEL, REF, ROLLOUT
from jetrl_verl.config.support.table import refusal
from jetrl_verl.formats.catalog import CACHES, FLOW, UNQUANTIZED
from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools.advise import AdviseError
from jetrl_verl.tools.advise.gpus import GPUS, MEASURED
from jetrl_verl.tools.advise.rollout import MOST_RANKS
from jetrl_verl.tools.advise.shapes import Model, find_config, model_of
from jetrl_verl.tools.advise.trainer import MOST_SEQUENCES
from jetrl_verl.tools.launch import precision_word

MICRO_TOKENS = 16384
"""Tokens of a micro-batch where nothing says how many: verl's default of ``ppo_max_token_len_per_gpu``."""

MOST_REQUESTS = 256
"""Requests of a replica that run at once where nothing says how many; vLLM's default of ``max_num_seqs``."""

GPUS_OF_A_HOST = 8
"""Where nothing says how many."""


@dataclass(frozen=True)
class Job:
    """Sizes of a step.

    Attributes:
        model: its sizes. prompts, samples: prompts of a step, responses to each.
        prompt, response: mean tokens. longest_prompt, longest_response: the largest that the job allows.
        gpus: of the trainer, and of the rollout, which shares them. tp: GPUs of a replica of the rollout.
        gpus_of_host: of them, how many a host has; all, or eight, if None. gpu: which, of ``GPUS``.
        utilization, most, batched_tokens, prefix_caching: vLLM's ``gpu_memory_utilization``, ``max_num_seqs``,
            ``max_num_batched_tokens``, ``enable_prefix_caching``.
        micro_tokens, micro_sequences: of a micro-batch of an update; one of them is None.
        log_prob_tokens, log_prob_sequences: of the old log-probabilities.
        mini_batches, epochs: optimizer steps of a step are their product.
        packed: whether padding is removed. varlen: whether ``attn_implementation=jetrl_varlen``.
        checkpointing, eight_bit, shards: of the trainer.
        reference: whether a reference policy scores every token. liger: whether the trainer has Liger's kernels.
        stock, backward, fp8_reference, kv_cache, gathers_once: what ``jetrl.operations=stock``, ``jetrl.backward``,
            ``jetrl.ref``, ``jetrl.kv_cache`` and ``jetrl.gathered`` say.
        notes: what was assumed, sentences.
    """

    model: Model
    prompts: int
    samples: int
    prompt: float
    response: float
    longest_prompt: int
    longest_response: int
    gpus: int
    tp: int = 1
    utilization: float = 0.5
    most: int = MOST_REQUESTS
    batched_tokens: int = 8192
    prefix_caching: bool = True
    micro_tokens: int | None = MICRO_TOKENS
    micro_sequences: int | None = None
    log_prob_tokens: int | None = MICRO_TOKENS
    log_prob_sequences: int | None = None
    mini_batches: int = 1
    epochs: int = 1
    packed: bool = True
    varlen: bool = False
    checkpointing: bool = True
    eight_bit: bool = False
    shards: int | None = None
    reference: bool = False
    liger: bool = False
    stock: bool = False
    backward: str = FLOW
    fp8_reference: bool = False
    kv_cache: str = UNQUANTIZED
    gathers_once: bool = False
    gpus_of_host: int | None = None
    gpu: str = MEASURED
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name, value in (
            ("batch", self.prompts),
            ("n", self.samples),
            ("response length", self.longest_response),
            ("number of GPUs", self.gpus),
            ("tensor-parallel size", self.tp),
        ):
            if value < 1:
                raise AdviseError(f"the {name} is {value}; give a number from 1 on.")
        if self.gpu not in GPUS:
            raise AdviseError(f"there is no prediction for the GPU {self.gpu}; choose --gpu {' or '.join(GPUS)}.")
        if self.gpus % self.tp:
            raise AdviseError(f"{self.gpus} GPUs hold no whole number of replicas of {self.tp}; choose another --tp.")
        if not 0 < self.response <= self.longest_response:
            raise AdviseError(
                f"a mean response of {self.response:g} tokens is not between 1 and the longest, "
                f"{self.longest_response}; choose another --mean-response."
            )
        if not 0 <= self.prompt <= self.longest_prompt:
            raise AdviseError(
                f"a mean prompt of {self.prompt:g} tokens is not between 0 and the longest, {self.longest_prompt}; "
                "choose another --mean-prompt."
            )

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def sequences_of_a_gpu(self) -> float:
        """Of a step; the trainer's GPUs share them."""
        return self.sequences / self.gpus

    @property
    def gpu_bytes(self) -> float:
        """Memory of one GPU."""
        return GPUS[self.gpu].memory

    @property
    def of_one_host(self) -> int:
        """GPUs of the job that one host has."""
        return min(self.gpus, self.gpus_of_host or GPUS_OF_A_HOST)


@dataclass(frozen=True)
class Means:
    """Mean lengths that the user gave, in tokens; None for half of the longest."""

    prompt: float | None = None
    response: float | None = None

    def of(self, longest_prompt: int, longest_response: int) -> tuple[float, float, tuple[str, ...]]:
        """Mean prompt and response, and what was assumed."""
        prompt = longest_prompt / 2 if self.prompt is None else self.prompt
        response = longest_response / 2 if self.response is None else self.response
        notes = []
        if self.response is None:
            notes.append(
                f"responses have {response:g} tokens in the mean, half of the longest; --mean-response says it."
            )
        if self.prompt is None and longest_prompt:
            notes.append(f"prompts have {prompt:g} tokens in the mean, half of the longest; --mean-prompt says it.")
        return prompt, response, tuple(notes)


def job_of_options(
    model: str,
    gpus: int,
    prompt_length: int,
    response_length: int,
    batch: int,
    samples: int,
    means: Means,
    **others: Any,
) -> Job:
    """A job of the command's options; verl's defaults for what they do not say."""
    tp = others.get("tp", 1)
    prompt, response, notes = means.of(prompt_length, response_length)
    sizes = model_of(model, find_config(model), tp)
    notes += _drawn_out(batch * samples / gpus)
    return Job(sizes, batch, samples, prompt, response, prompt_length, response_length, gpus, notes=notes, **others)


def job_of_config(get: Get, means: Means, name: str | None = None, gpu: str = MEASURED) -> Job:
    """A job of verl's composed configuration.

    Args:
        get: reads it. name: model folder or known name, in the place of ``model.path``. gpu: of ``GPUS``.
    """
    tp = int(get(f"{ROLLOUT}.tensor_model_parallel_size") or 1)
    model = name or str(get(f"{MODEL}.path"))
    longest_prompt, longest_response = int(get("data.max_prompt_length")), int(get("data.max_response_length"))
    prompt, response, notes = means.of(longest_prompt, longest_response)
    prompts, samples = int(get("data.train_batch_size")), int(get(f"{ROLLOUT}.n") or 1)
    mini = int(get(f"{ACTOR}.ppo_mini_batch_size") or prompts)
    gpus_of_host = int(get("trainer.n_gpus_per_node") or 1)
    gpus = gpus_of_host * int(get("trainer.nnodes") or 1)
    micro, more = _micro(get, ACTOR, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "use_dynamic_bsz")
    scored, _ = _micro(
        get,
        ROLLOUT,
        "log_prob_micro_batch_size_per_gpu",
        "log_prob_max_token_len_per_gpu",
        "log_prob_use_dynamic_bsz",
    )
    shards = int(get(f"{ACTOR}.fsdp_config.fsdp_size") or -1)
    notes += more
    for key, what in (
        (f"{ACTOR}.fsdp_config.param_offload", "weights"),
        (f"{REF}.fsdp_config.param_offload", "reference"),
    ):
        if get(key):
            notes += (f"moving the {what} to the host and back ({key}) is in no prediction.",)
    packed, varlen = bool(get(f"{MODEL}.use_remove_padding")), get(ATTENTION) == JETRL_ATTENTION
    if packed and not varlen:
        notes += ("attention of packed sequences is predicted at sdpa's rate, for want of a record of flash-attn.",)
    if tp > MOST_RANKS:
        notes += (f"what {tp} GPUs of a replica take to add their products is drawn out from {MOST_RANKS}.",)
    if tp > 1:
        notes += (
            f"with shared operations the trainer multiplies o and down in {tp} slices of K, as the rollout's GPUs do; "
            "what that costs it is in no prediction, for want of a record.",
        )
    notes += _drawn_out(prompts * samples / gpus)
    if (ulysses := int(get(f"{ACTOR}.ulysses_sequence_parallel_size") or 1)) > 1:
        notes += (
            f"with Ulysses over {ulysses} GPUs each of them has all sequences of the {ulysses}; verl's own work is "
            "predicted for a GPU's share of them, for want of a record.",
        )
    if get("algorithm.filter_groups.enable"):
        notes += ("groups that dynamic sampling throws away (algorithm.filter_groups) are generated besides.",)
    if get("algorithm.adv_estimator") == "gae":
        notes += ("a critic (algorithm.adv_estimator=gae) is in no prediction.",)
    optimizer = f"{get(f'{ACTOR}.optim.optimizer')}{get(f'{ACTOR}.optim.optimizer_impl')}"
    return Job(
        model_of(model, find_config(model), tp),
        prompts,
        samples,
        prompt,
        response,
        longest_prompt,
        longest_response,
        gpus,
        tp,
        utilization=float(get(f"{ROLLOUT}.gpu_memory_utilization")),
        most=int(get(f"{ROLLOUT}.max_num_seqs")),
        batched_tokens=int(get(f"{ROLLOUT}.max_num_batched_tokens") or 8192),
        prefix_caching=bool(get(f"{ROLLOUT}.enable_prefix_caching")),
        micro_tokens=micro[0],
        micro_sequences=micro[1],
        log_prob_tokens=scored[0],
        log_prob_sequences=scored[1],
        mini_batches=math.ceil(prompts / mini),
        epochs=int(get(f"{ACTOR}.ppo_epochs") or 1),
        packed=packed,
        varlen=varlen,
        checkpointing=bool(get(f"{MODEL}.enable_gradient_checkpointing")),
        eight_bit="8bit" in optimizer.lower(),
        shards=min(shards, gpus) if shards > 0 else None,
        reference=bool(get(f"{ACTOR}.use_kl_loss") or get("algorithm.use_kl_in_reward")),
        liger=bool(get(f"{MODEL}.use_liger")),
        stock=get("jetrl.operations") == "stock",
        backward=str(get("jetrl.backward") or FLOW),
        fp8_reference=get("jetrl.ref") == FLOW,
        kv_cache=_cache(get),
        gathers_once=get("jetrl.gathered") == "batch",
        gpus_of_host=gpus_of_host,
        gpu=gpu,
        notes=notes,
    )


def _drawn_out(sequences: float) -> tuple[str, ...]:
    """A note where a GPU has more sequences than any on record."""
    if sequences <= MOST_SEQUENCES:
        return ()
    return (
        f"verl's own work around the trainer's phases is drawn out from {MOST_SEQUENCES} sequences a GPU to "
        f"{sequences:.0f}.",
    )


def _cache(get: Get) -> str:
    kept = str(get("jetrl.kv_cache") or UNQUANTIZED)
    if kept not in CACHES:
        words = {"key": "jetrl.kv_cache", "value": kept, "choices": f"one of {', '.join(CACHES)}"}
        raise AdviseError(refusal("option_value", **words))
    return kept


def _micro(
    get: Get, node: str, sequences: str, tokens: str, dynamic: str
) -> tuple[tuple[int | None, int | None], tuple[str, ...]]:
    """Tokens or sequences of a micro-batch, and what was assumed."""
    if get(f"{node}.{dynamic}"):
        return (int(get(f"{node}.{tokens}")), None), ()
    if get(f"{node}.{sequences}"):
        return (None, int(get(f"{node}.{sequences}"))), ()
    note = f"nothing says how large a micro-batch is ({node}.{sequences}); taken as {MICRO_TOKENS} tokens."
    return (MICRO_TOKENS, None), (note,)


# --- from a command line of verl -------------------------------------------------------------------------------------

PRIMARY = "ppo_trainer"
_CONFIG_NAME = ("--config-name", "-cn")
_RECORDER = """#!/bin/sh
# Stands for python in a recipe's script: writes down the trainer's command line, runs nothing of verl.
for word in "$@"; do case "$word" in verl.trainer.*|recipe.*)
    shift_to=$word; while [ "$1" != "$shift_to" ]; do shift; done; shift
    printf '%s\\0' "$@" > "$JETRL_ADVISE_WORDS"; exit 0;; esac; done
[ "$1" = "-c" ] && exit 0
exec "$JETRL_ADVISE_PYTHON" "$@"
"""


def words_of_script(script: Path, arguments: Sequence[str] = ()) -> list[str]:
    """The overrides that a recipe's script hands to verl's trainer.

    The script runs with ``python`` replaced by a recorder, which writes down the trainer's words and starts nothing of
    verl; other commands of the script do run.

    Raises:
        AdviseError: no such script, or it starts no trainer of verl.
    """
    if not script.is_file():
        raise AdviseError(f"{script} is no file; name a recipe's script.")
    with tempfile.TemporaryDirectory(prefix="jetrl-advise-") as folder:
        words, shims = Path(folder) / "words", Path(folder) / "bin"
        shims.mkdir()
        for name in ("python", "python3", Path(sys.executable).name):
            shim = shims / name
            shim.write_text(_RECORDER)
            shim.chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{shims}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHON": str(shims / "python3"),
            "OUT": folder,  # where our recipes make a folder for their metrics
            "JETRL_ADVISE_WORDS": str(words),
            "JETRL_ADVISE_PYTHON": sys.executable,
        }
        bash = shutil.which("bash") or "/bin/bash"
        done = subprocess.run(
            [bash, str(script), *arguments], env=environment, capture_output=True, text=True, check=False
        )
        if not words.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            why = f" ({last[0]})" if last else ""
            raise AdviseError(f"{script} started no trainer of verl{why}; pass its overrides after `--` instead.")
        return [word for word in words.read_text().split("\0") if word]


def compose(words: Sequence[str], precision: str) -> Any:
    """verl's configuration with a user's overrides and ``precision``, neither refused nor resolved.

    Raises:
        AdviseError: Hydra does not accept the words, or verl is not installed.
    """
    try:
        import verl.trainer.config  # noqa: F401  brings the group `precision` into Hydra
    except ImportError as error:
        raise AdviseError(f"verl is not installed here ({error}); use --model, --gpus and the lengths.") from None
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from jetrl_verl.config.hydra_plugin import unchecked

    name, overrides = _primary(words)
    # The precision is asked about, not taken; the last word of the group wins in Hydra.
    overrides = [word for word in overrides if precision_word([word]) is None]
    try:
        with initialize_config_module("verl.trainer.config", version_base=None), unchecked():
            return hydra_compose(name, overrides=[*overrides, f"precision={precision}"])
    except (HydraException, OmegaConfBaseException) as error:
        raise AdviseError(f"verl does not accept these overrides: {' '.join(str(error).split())}") from None


def _primary(words: Sequence[str]) -> tuple[str, list[str]]:
    name, overrides, left = PRIMARY, [], list(words)
    while left:
        word = left.pop(0)
        key, _, value = word.partition("=")
        if key in _CONFIG_NAME:
            name = (value or (left.pop(0) if left else "")).removesuffix(".yaml")
        elif word.startswith("-"):
            raise AdviseError(f"{key} is not understood here; pass verl's overrides, key=value, after `--`.")
        else:
            overrides.append(word)
    return name, overrides


def as_mapping(job: Job) -> Mapping[str, Any]:
    """For JSON."""
    found = {each.name: getattr(job, each.name) for each in fields(job) if each.name != "model"}
    return {"model": job.model.name, **found}
