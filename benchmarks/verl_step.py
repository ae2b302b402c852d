# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A step of real verl by phase, over the length of responses: what a user sees of each precision.

    python3 -m benchmarks.verl_step OUT --model qwen3_4b --response 4096        # every row below on one H200
    python3 -m benchmarks.verl_step OUT --model qwen3_8b --response 1024 --rows bf16,jet_fp8 --seconds 580
    python3 -m benchmarks.verl_step OUT --model qwen3_8b --gpus 4 --tp 2 --rows bf16,jet_fp8_exact --response 4096
    python3 -m benchmarks.verl_step OUT --model qwen3_moe_3b --rows bf16,fp8_rollout,jet_fp8 --response 1024
    python3 -m benchmarks.verl_step OUT --model qwen3_30b_a3b --layers 4 --gpus 2 --tp 2 --rows bf16,jet_fp8
    python3 -m benchmarks.verl_step OUT --rows jet_fp8,jet_fp8+jetrl.kv_cache=fp8 --response 16384
    python3 -m benchmarks.verl_step OUT --engine-rows jet_fp8 --seconds 560     # and again: takes what is left
    python3 -m benchmarks.verl_step OUT --tiny [--gpus 2 --tp 2]                # two narrow layers on a CPU, to try it

Packed sequences, GRPO with one update a step, no KL term, ``--sequences`` responses, four to a prompt, each of exactly
``--response`` tokens (``rollout.ignore_eos``); a run with another length has failed. ``--steps`` steps, of which the
first compiles and is left out. ``--gpus`` GPUs of one host train with FSDP2 and run rollouts over ``--tp`` of them
each. Rows:

- ``bf16``: verl's defaults, with flash-attn where it is installed, else with the attention named in the output
- ``bf16_best``: the same with Liger's kernels and FlashAttention 3
- ``bf16_shared``: BF16 with this project's operations between the linears
- ``verl_fp8``: verl's own FP8 rollout, ``rollout.quantization=fp8``, BF16 training
- ``fp8_rollout``, ``jet_fp8``, ``jet_fp8_exact``
- one of these with overrides, ``fp8_rollout+jetrl.kv_cache=fp8`` (jetrl_verl/tools/rows.py)

A row that cannot run on this machine says why and is no failure; one that fails does not stop the next.

``gen tok/s`` is the rate of generation inside verl, ``engine tok/s`` that of the same engine alone, in a process of its
own right after the run, with the run's arguments, prompts and sampling (engine_alone.py). Both count all replicas.
``rest`` is the step's time outside all phases. ``peak gib`` is what a trainer allocated, ``gpu peak gib`` the largest
memory in use of any of several GPUs. Below four GPUs the 8B model trains with 8-bit
AdamW; there, and with responses beyond 8k, parameters and optimizer are kept in host memory while the rollout works.

OUT gets ``verl_step.json`` after each row. A later call with the same OUT takes the rows that have not ended well with
the same code (``--again``: all that it names), also on another machine with the same GPU; a line below the table tells
rows of several builds apart. ``--seconds`` is how long a call may take: the row that runs then is ended, and what it
logged counts; none begins in less time than the fastest one took. ``--engine-rows`` names the rows whose engine is
measured alone. ``--set`` adds an override of verl to every row of the call, and to its name in the table.

Apart from lengths and batch, all rows differ from verl's defaults in this: vLLM's ``max_num_seqs`` is ``--sequences``,
so it captures CUDA graphs of those sizes alone, the order of the data has a seed, and Ray has no dashboard. ``start_s``
has the seconds of each phase of a row's start.
"""

import argparse
import functools
import importlib.util
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pyarrow import parquet
from rich.console import Console

from benchmarks.engine_alone import measured
from benchmarks.gpus import too_few, unfit
from benchmarks.published_shapes import PUBLISHED, SHARED_ON_A_CPU, is_mixture, write_data, write_model_apart
from benchmarks.recipes import EIGHT_BIT, OFFLOAD, ROOT
from benchmarks.verl_runs import (
    FIGURES,
    Results,
    compile_bytecode,
    environment_of,
    fresh_folder,
    not_begun,
    run_verl,
    take_all,
)
from jetrl_verl.inputs import UserError
from jetrl_verl.tools.demo.overrides import words_of_a_local_ray, words_on_a_cpu
from jetrl_verl.tools.launch import VERL, RunPaths, quote
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.tools.rows import Row, parse_row, split_rows

STEPS = 3
SAMPLES = 4
PROMPT = 512
ATTENTION = "++actor_rollout_ref.model.override_config.attn_implementation"
PLUGINS_ATTENTION = "jetrl_varlen"

ROWS: dict[str, list[str]] = {
    "bf16": ["precision=bf16"],
    "bf16_best": ["precision=bf16", "actor_rollout_ref.model.use_liger=True", f"{ATTENTION}={PLUGINS_ATTENTION}"],
    "bf16_shared": ["precision=bf16_shared"],
    "verl_fp8": ["precision=bf16", "actor_rollout_ref.rollout.quantization=fp8"],
    "fp8_rollout": ["precision=fp8_rollout"],
    "jet_fp8": ["precision=jet_fp8"],
    "jet_fp8_exact": ["precision=jet_fp8_exact"],
}
"""Row -> overrides that make it."""

BF16_LINEARS = ("bf16", "bf16_best", "bf16_shared")
"""Rows of which no linear layer is quantized, so that a rank's shards have any size."""

NAMES = ("model", "response", "gpus", "tp", "row")
TOKENS = 16384
"""Tokens of a micro-batch at least; one sequence where it is longer."""

WHOLE_GPUS = 4
"""GPUs over which the state of the 8B model, 131 GB with FP32 moments, fits next to its rollout."""

SIZES = {False: (4096, 64), True: (24, 8)}
"""Whether it is the tiny benchmark -> tokens of a response, and sequences of a step, where the call names none."""


def lacking(row: str, on_a_cpu: bool, model: str = "") -> str:
    """Why a row cannot run on this machine, or with this model of ``PUBLISHED``; empty if it can."""
    if row == "bf16_shared" and model and is_mixture(model):
        return "not run, since a mixture of experts is supported by the FP8 flow alone"
    if row == "bf16_best" and on_a_cpu:
        return "not run, since Liger's kernels and FlashAttention 3 need a GPU"
    if row == "bf16_best" and not importlib.util.find_spec("liger_kernel"):
        return "not run, since Liger is not installed; pip install liger-kernel"
    if row == "verl_fp8" and on_a_cpu:
        return "not run, since vLLM's own FP8 linear layers need a GPU"
    return ""


console = Console(width=240)


def words_of(row: Row, options: argparse.Namespace, model: Path, data: Path, paths: RunPaths) -> list[str]:
    """Overrides of verl for one row."""
    tokens = max(TOKENS, PROMPT + options.response)
    words = [
        *ROWS[row.name],
        f"data.train_files={quote(data / 'train.parquet')}",
        f"data.val_files={quote(data / 'test.parquet')}",
        f"data.train_batch_size={options.sequences // SAMPLES}",
        "data.seed=1",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={options.response}",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        f"reward.custom_reward_function.path={quote(ROOT / 'benchmarks/coin_reward.py')}",
        "reward.custom_reward_function.name=compute_score",
        f"actor_rollout_ref.model.path={quote(model)}",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={options.sequences // SAMPLES}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={options.tp}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={options.memory}",
        f"actor_rollout_ref.rollout.max_model_len={PROMPT + options.response}",
        f"actor_rollout_ref.rollout.max_num_seqs={options.sequences}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={options.gpus}",
        f"trainer.total_training_steps={options.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.project_name=jetrl-step",
        f"trainer.experiment_name={row.slug}",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={quote(paths.folder / 'checkpoints')}",
        f"hydra.run.dir={quote(paths.folder / 'hydra')}",
        *words_of_a_local_ray(),
    ]
    if options.tiny:
        shared = [SHARED_ON_A_CPU] if row.name == "jet_fp8" and is_mixture(options.model) else []
        on_a_cpu = [*words_on_a_cpu(), f"++ray_kwargs.ray_init.num_gpus={options.gpus}"]
        on_a_cpu += [f"ray_kwargs.ray_init.num_cpus={16 * options.gpus}"]
        return [*words, f"{ATTENTION}={PLUGINS_ATTENTION}", *on_a_cpu, *shared, *row.settings, *options.set]
    if row.name != "bf16_best" and not importlib.util.find_spec("flash_attn"):
        words.append(f"{ATTENTION}={PLUGINS_ATTENTION}")
    if options.model == "qwen3_8b" and options.gpus < WHOLE_GPUS:
        words += EIGHT_BIT
    if (options.model == "qwen3_8b" and options.gpus < WHOLE_GPUS) or options.response > 8192:
        words += OFFLOAD
    return [*words, *row.settings, *options.set]


def data_of(out: Path) -> Path:
    """Folder of a benchmark's prompts."""
    return out / "data"


def prepare_data(out: Path, rows: int) -> None:
    """Write so many prompts, by the program of the recipe whose format they have; as many as that, or more, stay."""
    written = data_of(out) / "train.parquet"
    if not written.exists() or parquet.read_metadata(written).num_rows < rows:
        write_data("gsm8k", out / "raw", rows=rows)
        prepare = [sys.executable, "-m", "recipes.gsm8k.prepare_data", "--local-dir", out / "raw"]
        subprocess.run([*prepare, "--out", data_of(out)], cwd=ROOT, check=True)


def derived(figures: dict, sequences: int) -> dict:
    """Rates of a run's figures."""
    if not figures.get("gen_s"):
        return {}
    rate = sequences * figures["response_length"] / figures["gen_s"]
    alone = figures.get("engine_tokens_per_s")
    return {
        "gen_tokens_per_s": rate,
        **({"of_the_engine": rate / alone} if alone else {}),
    }


def other_length(figures: dict, response: int) -> list[str]:
    """Whether a run's responses have another length than they were to have, as errors."""
    if not figures["steps"] or figures["response_length"] == response:
        return []
    return [f"responses have {figures['response_length']:.2f} tokens in the mean and were to have {response}"]


def fastest(results: Results, job: dict) -> float:
    """Seconds of the fastest row of this job so far; 0 where none has ended well."""
    took = [run["seconds"] for run in results.runs if {**job, "status": 0}.items() <= run.items()]
    return min(took, default=0.0)


def take_row(
    row: Row, options: argparse.Namespace, model: Path, data: Path, ends: float, needed: Callable[[], float]
) -> dict:
    """Figures and exit status of one row: a run of verl, then its engine alone. ``needed``: seconds at least."""
    if reason := lacking(row.name, options.tiny, options.model):
        return {"status": None, "errors": [reason]}
    if ends - time.monotonic() < needed():
        return not_begun()
    named = Row(row.name, (*row.settings, *options.set))
    job = f"{model.name}-{options.response}-{options.gpus}x{options.tp}"
    paths = RunPaths(options.out / "runs" / f"{job}-{named.slug}")
    fresh_folder(paths)
    words = words_of(row, options, model, data, paths)
    environment = environment_of(paths, options.tiny)
    gpus = 0 if options.tiny else options.gpus
    figures = run_verl([*VERL, *words], environment, paths, options.steps, ends, gpus)
    if errors := other_length(figures, options.response):
        figures |= {"status": figures["status"] or 1, "errors": [*figures.get("errors", ()), *errors]}
    if figures["steps"] and row in options.engine_rows and time.monotonic() < ends:
        figures |= measured(paths, options.steps, options.tiny, ends)
    return {"words": words, **figures, **derived(figures, options.sequences)}


def arranged(options: argparse.Namespace, rows: list[Row]) -> str:
    """Why a call's GPUs, model and batch do not go together; empty if they do."""
    quantized = any(row.name not in BF16_LINEARS for row in rows)
    if reason := unfit(options.model, options.gpus, options.tp, quantized):
        return reason
    if options.sequences % (SAMPLES * options.gpus):
        least = SAMPLES * options.gpus
        return (
            f"--sequences {options.sequences} is not supported with --gpus {options.gpus}. Set a multiple of {least}."
        )
    return ""


def main(words: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", choices=PUBLISHED, default="qwen3_4b")
    parser.add_argument("--layers", type=int, help="instead of the model's number, and a part of its name in the table")
    parser.add_argument("--response", type=int, help="tokens of a response, 4096 if not set")
    parser.add_argument("--sequences", type=int, help="of a step, 64 if not set")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{STEPS} if not set; at least 2 to leave one out")
    parser.add_argument("--gpus", type=int, default=1, help="of one host")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of one replica of the rollout")
    parser.add_argument("--memory", type=float, default=0.45, help="vLLM's share of the GPU's memory")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, separated by commas")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that this call may take, no limit if not set")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of verl's")
    parser.add_argument("--engine-rows", help="whose engine is measured alone, too; all if not set")
    parser.add_argument("--no-engine", action="store_true", help="leave out the engine alone")
    parser.add_argument("--again", action="store_true", help="also rows that have ended well already")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try this out")
    options = parser.parse_args(words)
    try:
        rows = [parse_row(text, ROWS, "a row") for text in split_rows(options.rows)]
        engines = split_rows(options.engine_rows) if options.engine_rows else ()
        options.engine_rows = [parse_row(text, ROWS, "a row") for text in engines] or rows
    except UserError as error:
        parser.error(str(error))
    options.engine_rows = [] if options.no_engine else options.engine_rows
    response, sequences = SIZES[options.tiny]
    options.response = options.response or response
    options.sequences = options.sequences or sequences
    if reason := arranged(options, rows):
        parser.error(reason)
    out = options.out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    kept = ("sequences", "steps", "memory", "tiny")
    settings = {name: getattr(options, name) for name in kept} | {"exact_length": True}
    results = Results(out / "verl_step.json", NAMES, settings, provenance())
    ends = began + options.seconds
    shape = options.model + (f"-{options.layers}_layers" if options.layers else "")
    job = {"model": shape, "response": options.response, "gpus": options.gpus, "tp": options.tp}
    named = [({**job, "row": " ".join([str(row), *options.set])}, row) for row in rows]
    named = [(name, row) for name, row in named if options.again or not results.done(name)]
    columns = (*(name for name in FIGURES if name not in ("grad_norm", "ref_s")), "rest_s", "gpu_peak_gib")
    columns += ("gen_tokens_per_s", "engine_tokens_per_s", "of_the_engine")
    if not named:
        results.show(columns, console)
        return 0
    if reason := too_few(options.gpus, options.tiny):
        parser.error(reason)
    of_ranks = f"-{options.tp}_ranks" if options.tiny and options.tp > 1 else ""
    model, data = out / "models" / f"{shape}{of_ranks}", data_of(out)
    compiled = compile_bytecode(console)
    write_model_apart(options.model, model, options.tiny, options.layers, ranks=options.tp)
    prepare_data(out, options.sequences * options.steps)
    compiled()
    needed = functools.partial(fastest, results, job)
    runs = [(name, functools.partial(take_row, row, options, model, data, ends, needed)) for name, row in named]
    return take_all(results, runs, columns, ends, console)


if __name__ == "__main__":
    sys.exit(main())
