# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The command: prints what a job's phases hold, what does not fit, and which settings cost exactness."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from jetrl_verl.config.built import check_adapters
from jetrl_verl.config.composition import images_of, reader
from jetrl_verl.config.model import ModelFiles, cache_message, fields_of_one_side, overrides_of_trainer
from jetrl_verl.config.support.operations import NOTE_ROWS
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.config.support.scopes import ADAPTERS, EXACT, MODEL, ROLLOUT, SHARED
from jetrl_verl.config.support.table import TABLE, as_exact, model_refusal
from jetrl_verl.formats.catalog import CACHES, UNQUANTIZED
from jetrl_verl.inputs import UserError
from jetrl_verl.models import UnsupportedLayer, family
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.tools import launch
from jetrl_verl.tools.launch import precision_word, say
from jetrl_verl.tools.memory.shapes import Model, find_config, model_of
from jetrl_verl.tools.memory.terms import (
    GIB,
    PRECISIONS,
    Terms,
    check_numbers,
    gpus_of,
    longest_of,
    micro_batches,
    phases_of,
    rollout_gpus_of,
)

REMEDIES = {
    "rollout": "a lower gpu_memory_utilization, param_offload and optimizer_offload, or more GPUs",
    "old log-probs": "a smaller log_prob_max_token_len_per_gpu, optimizer_offload, or more GPUs",
    "update": "a smaller ppo_max_token_len_per_gpu, moments in 8 bits, jetrl.gathered=pass, or more GPUs",
    "sync": "a smaller update_weights_bucket_megabytes, optimizer_offload, or more GPUs",
}
"""Phase -> what to set where it does not fit."""

REFUSED, STOCK, INEXACT = "FP8 training is refused", "jet_fp8 runs stock operations", "jet_fp8_exact is refused"
"""What a setting costs."""


def run_memory(words: Sequence[str], script: Path | None, gib: float, console: Console) -> None:
    """Count a job and print it. ``words``: overrides of verl. ``script``: a recipe's. ``gib``: memory of a GPU."""
    if script is not None:
        words = words_of_script(script, words)
    if not words:
        raise UserError("there is no job. Pass --script FILE, --model NAME, or verl's overrides after `--`.")
    config = compose(words)
    get = reader(config)
    check_numbers(get)
    gpus, tp, name = gpus_of(get), get(f"{ROLLOUT}.tensor_model_parallel_size"), str(get(f"{MODEL}.path"))
    kv_cache, rollout_gpus = get("jetrl.kv_cache"), rollout_gpus_of(get)
    if (sampling := rollout_gpus or gpus) % tp:
        remedy = "Set a tensor_model_parallel_size that divides them."
        raise UserError(f"{sampling} GPUs hold no replicas of TP {tp}. {remedy}")
    model = model_of(name, find_config(name), tp)
    costs = costs_of(config, model, tp)
    effects = {effect for effect, _ in costs}
    stock = get("jetrl.operations") == "stock" or STOCK in effects
    columns = {
        precision.name: phases_of(get, model, precision, gib, stock)
        for precision in PRECISIONS
        if _runs(precision.name, model, stock, REFUSED in effects)
    }
    longest, prefixes = longest_of(get), bool(get(f"{ROLLOUT}.enable_prefix_caching"))
    tokens = {}
    for precision in (precision for precision in PRECISIONS if precision.name in columns):
        cache = UNQUANTIZED if precision.name == "bf16" else kv_cache
        of_request = model.request_bytes(longest, cache, prefixes, precision.shared and not stock)
        tokens[precision.name] = columns[precision.name]["rollout"]["KV cache"] * tp / of_request * longest
    together, states = (
        f"{gpus} + {rollout_gpus}" if rollout_gpus else gpus,
        model.recurrent * model.delta_bytes(not stock),
    )
    say(
        f"{name}: {model.parameters / 1e9:.2f}B parameters, {together} GPUs of {gib:g} GiB, rollout TP {tp}, "
        f"micro-batches of {micro_batches(get)[0]:.0f} tokens"
        + (f", states of {states / 2**20:.0f} MiB a request" if states else "")
    )
    console.print(table_of(columns, tokens))
    for sentence in problems(columns, tokens, gib, longest) or ["Every precision fits."]:
        say(sentence)
    say("Settings that cost exactness:" if costs else "No setting costs exactness.")
    for effect, message in costs:
        say(f"  {effect}: {message}")
    say("The GPU and the installation can cost it, too: `jetrl doctor` says so there.")


def _runs(precision: str, model: Model, stock: bool, refused: bool) -> bool:
    """Whether a precision runs the job; a mixture needs stock routers, or shared ones with FP8 training."""
    left_out = {"bf16_shared"} if stock else set()
    if model.experts:
        left_out |= {"bf16_shared", "int8_rollout"} | ({"jet_fp8"} if stock else set())
    return precision == "bf16" or not (refused or precision in left_out)


def words_of_script(script: Path, arguments: Sequence[str] = ()) -> list[str]:
    """The overrides that a recipe's script passes to verl: it runs with a ``$PYTHON`` that records them."""
    with tempfile.TemporaryDirectory(prefix="jetrl-memory-") as folder:
        words, python = Path(folder) / "words", Path(folder) / "python"
        python.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{words}'\n")
        python.chmod(0o755)
        environment = {**os.environ, "PYTHON": str(python), "OUT": folder}
        run = subprocess.run(["bash", str(script), *arguments], env=environment, capture_output=True)
        recorded = words.read_text(errors="replace").split("\0")[:-1] if words.is_file() else []
    if recorded[:1] != ["-m"]:
        why = " ".join(run.stderr.decode(errors="replace").strip().splitlines()[-1:])
        raise UserError(f"{script} starts no trainer of verl with $PYTHON ({why}). Pass its overrides after `--`.")
    return recorded[2:]


def compose(words: Sequence[str]) -> DictConfig:
    """verl's configuration with a user's overrides under ``precision=jet_fp8``, neither refused nor decided."""
    return launch.compose([*(word for word in words if precision_word([word]) is None), "precision=jet_fp8"], False)


def costs_of(config: DictConfig, model: Model, tp: int) -> list[tuple[str, str]]:
    """Effect and message of each setting, and of the model, that costs exactness in a job composed under ``jet_fp8``.
    The message is the one with which ``jet_fp8_exact`` refuses it (config/support)."""
    get = reader(config)
    exact, trained = as_exact(get), {**model.config, **overrides_of_trainer(get)}

    costs = []
    for row in (row for name, row in TABLE.items() if name not in NOTE_ROWS):
        for words in row.met(exact):
            effect = {SHARED: STOCK, EXACT: INEXACT}.get(row.scope, REFUSED)
            if effect == INEXACT and words["key"] == "jetrl.operations":
                effect = STOCK
            costs.append((effect, row.message(exact, **words)))
    try:
        if images := images_of(get):
            costs.append((INEXACT, TABLE["exact_images"].message(exact, what=images)))
        plan_linears(trained, tp)
        if ADAPTERS.applies(get):
            whole = AutoConfig.for_model(**trained).to_dict()  # with the fields that a published file leaves out
            check_adapters(get, model.name, whole)
    except UnsupportedLayer as error:
        costs.append((REFUSED, model_refusal(error, model.name, "jet_fp8_exact")))
    except UnsupportedConfiguration as error:
        costs.append((REFUSED, str(error)))
    for error in family(trained).uncovered_operations(trained):
        costs.append((STOCK, model_refusal(error, model.name, "jet_fp8_exact")))
    costs += [(REFUSED, message) for message in fields_of_one_side(model.config, trained, exact)]
    cache = CACHES[get("jetrl.kv_cache")]
    if cache.quantized and (message := cache_message(ModelFiles(model.name, None, trained), cache)):
        costs.append((REFUSED, message))
    return list(dict.fromkeys(costs))


def table_of(columns: dict[str, dict[str, Terms]], tokens: dict[str, float]) -> Table:
    """A row for each phase and each of its terms, and one for the tokens of a replica's cache."""
    table = Table("phase", box=SIMPLE_HEAD, title="GiB of one GPU")
    for name in columns:
        table.add_column(name, justify="right")
    for phase in REMEDIES:
        cells = [phases[phase] for phases in columns.values()]
        table.add_row(phase, *(f"{sum(terms.values()) / GIB:.1f}" for terms in cells), style="bold")
        for term in dict.fromkeys(term for terms in cells for term in terms if terms[term]):
            table.add_row(f"  {term}", *(f"{terms.get(term, 0.0) / GIB:.1f}" for terms in cells))
    table.add_row("tokens in a replica's KV cache", *(f"{count:.0f}" for count in tokens.values()))
    return table


def problems(columns: dict[str, dict[str, Terms]], tokens: dict[str, float], gib: float, longest: int) -> list[str]:
    """A sentence for each phase that does not fit a GPU, and one for caches that are shorter than a sequence."""
    sentences = []
    for phase, remedy in REMEDIES.items():
        sizes = {name: sum(phases[phase].values()) / GIB for name, phases in columns.items()}
        full = [f"{size:.1f} GiB under {name}" for name, size in sizes.items() if size > gib]
        if full:
            sentences.append(f"{phase} does not fit: {', '.join(full)}. Set {remedy}.")
    if short := [name for name in columns if tokens[name] < longest]:
        remedy = "a higher gpu_memory_utilization or tensor_model_parallel_size"
        sentences.append(
            f"A sequence of {longest} tokens does not fit the KV cache of {', '.join(short)}. Set {remedy}."
        )
    return sentences
