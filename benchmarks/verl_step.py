# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A step of real verl by phase, over the length of responses: what a user sees of each precision.

    python3 -m benchmarks.verl_step OUT --model qwen3_4b --response 4096        # every row below on one H200
    python3 -m benchmarks.verl_step OUT --model qwen3_8b --response 1024 --rows bf16,jet_fp8 --seconds 580
    python3 -m benchmarks.verl_step OUT --model qwen3_moe_3b --rows bf16,fp8_rollout,jet_fp8 --response 1024
    python3 -m benchmarks.verl_step OUT --model qwen3_30b_a3b --layers 4 --rows bf16,jet_fp8 --response 1024
    python3 -m benchmarks.verl_step OUT --rows jet_fp8 --set jetrl.kv_cache=fp8 --response 16384
    python3 -m benchmarks.verl_step OUT --engine-rows jet_fp8 --seconds 560     # and again: takes what is left
    python3 -m benchmarks.verl_step OUT --add FILE --rows bf16                  # beside rows that another machine took
    python3 -m benchmarks.verl_step OUT --tiny                                  # two narrow layers on a CPU, to try it

One GPU, packed sequences, GRPO with one update a step, no KL term, ``--sequences`` responses of one length (a random
policy does not end them), four to a prompt. ``--steps`` steps, of which the first compiles and is left out. Rows:

- ``bf16``: verl as it comes, with flash-attn where it is installed, else with the attention named in the output
- ``bf16_best``: the same with Liger's kernels and FlashAttention 3
- ``bf16_shared``: BF16 with this project's operations between the linears
- ``verl_fp8``: verl's own FP8 rollout, ``rollout.quantization=fp8``, BF16 training
- ``fp8_rollout``, ``jet_fp8``, ``jet_fp8_exact``

A row that cannot run on this machine says why and is no failure; one that fails does not stop the next.

``gen tok/s`` is what generation inside verl reaches, ``engine tok/s`` what the same engine reaches alone, in a process
of its own, with the same prompts, lengths and settings: their quotient is verl's share. ``rest`` is what no phase has.
At 16k responses, and with the 8B model, parameters and optimizer are kept in host memory while the rollout works; the
8B model trains with 8-bit AdamW.

OUT gets ``verl_step.json`` after each row. A later call with the same OUT takes the rows that have not ended well with
the same code (``--again``: all that it names), and ``--add`` takes over rows of other machines with the same GPU, so
that a table may be the work of several calls; rows of several builds are told apart below it. ``--seconds`` is how long
a call may take: the row that runs then is ended, and what it logged counts; none begins in less time than the fastest
one took. ``--engine-rows`` leaves the engine alone out for other rows. ``--set`` adds an override of verl to every row
of the call, and to its name in the table.

Beside lengths and batch, all rows differ from verl's defaults in this: vLLM is told that no more than ``--sequences``
come at once, so it captures CUDA graphs of those sizes alone, and Ray has no dashboard. ``start_s`` of a row says where
its start went.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.published_shapes import PUBLISHED, SHARED_ON_A_CPU, is_mixture, write_data, write_model_apart
from benchmarks.recipes import EIGHT_BIT, OFFLOAD, ROOT
from benchmarks.verl_runs import (
    FIGURES,
    TIME_UP,
    Results,
    add_files,
    compile_bytecode,
    environment_of,
    fresh_folder,
    not_begun,
    run_verl,
    take_all,
)
from jetrl_verl.tools.demo.overrides import words_on_a_cpu
from jetrl_verl.tools.launch import VERL, RunPaths, quote
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.progress import last_errors
from jetrl_verl.tools.provenance import provenance

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

TOKENS = 16384
"""Tokens of a micro-batch at least; one sequence where it is longer."""

WARM_TOKENS = 16
"""Of a response in the engine's first generation alone, which compiles."""

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


console = Console(width=190)


def words_of(row: str, options: argparse.Namespace, model: Path, data: Path, paths: RunPaths) -> list[str]:
    """Overrides of verl for one row."""
    tokens = max(TOKENS, PROMPT + options.response)
    words = [
        *ROWS[row],
        f"data.train_files={quote(data / 'train.parquet')}",
        f"data.val_files={quote(data / 'test.parquet')}",
        f"data.train_batch_size={options.sequences // SAMPLES}",
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
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={options.memory}",
        f"actor_rollout_ref.rollout.max_model_len={PROMPT + options.response}",
        f"actor_rollout_ref.rollout.max_num_seqs={options.sequences}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={options.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.project_name=jetrl-step",
        f"trainer.experiment_name={row}",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={quote(paths.folder / 'checkpoints')}",
        f"hydra.run.dir={quote(paths.folder / 'hydra')}",
        "++ray_kwargs.ray_init.address=local",
        "++ray_kwargs.ray_init.include_dashboard=False",
    ]
    if options.tiny:
        shared = [SHARED_ON_A_CPU] if row == "jet_fp8" and is_mixture(options.model) else []
        return [*words, f"{ATTENTION}={PLUGINS_ATTENTION}", *words_on_a_cpu(), *shared, *options.set]
    if row != "bf16_best" and not importlib.util.find_spec("flash_attn"):
        words.append(f"{ATTENTION}={PLUGINS_ATTENTION}")
    if options.model == "qwen3_8b":
        words += EIGHT_BIT
    if options.model == "qwen3_8b" or options.response > 8192:
        words += OFFLOAD
    return [*words, *options.set]


def engine_alone(config: Path) -> None:
    """Print the tokens per second of vLLM alone, set up as a run's composed ``config`` says: the program of a child."""
    from omegaconf import OmegaConf
    from vllm import LLM, SamplingParams

    composed = OmegaConf.load(config)
    rollout, lengths = composed.actor_rollout_ref.rollout, composed.data
    llm = LLM(
        composed.actor_rollout_ref.model.path,
        load_format="dummy",
        dtype=rollout.dtype,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        enable_prefix_caching=rollout.enable_prefix_caching,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        logprobs_mode="processed_logprobs",
        **quantization_of(composed),
    )
    words = llm.get_tokenizer().vocab_size
    prompts = [
        {"prompt_token_ids": [(7 * group + place) % words for place in range(lengths.max_prompt_length // 2)]}
        for group in range(lengths.train_batch_size)
        for _ in range(rollout.n)
    ]
    for tokens in (WARM_TOKENS, lengths.max_response_length):  # the first compiles
        sampling = SamplingParams(temperature=rollout.temperature, max_tokens=tokens, logprobs=0, detokenize=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        rate = made / (time.perf_counter() - started)
    print(json.dumps({"engine_tokens_per_s": rate}), flush=True)


def quantization_of(composed) -> dict:
    """Arguments of vLLM by which an engine has the linear layers and operations of a run's rollout."""
    from jetrl_verl.config.options import JetConfig
    from jetrl_verl.rollout.arguments import vllm_arguments

    if "jetrl" in composed:
        return vllm_arguments(JetConfig.from_node(composed.jetrl), None)
    if composed.actor_rollout_ref.rollout.quantization != "fp8":
        return {}
    # As verl 0.9.1 asks for it (vllm_async_server.py, _apply_quantization).
    blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"quantization": "fp8", "hf_overrides": {"quantization_config": blocks}}


def measured_alone(cpu: bool, paths: RunPaths, ends: float) -> dict:
    """What :func:`engine_alone` prints in a process of its own; ``engine_status`` where it failed or its time was up.

    It never fails a row: the run of verl is what was asked for.
    """
    command = [sys.executable, "-m", "benchmarks.verl_step", "--engine", str(paths.config)]
    environment = environment_of(paths, cpu) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": python_path()}
    log = paths.folder / "engine.log"
    with ProcessTree(command, environment, log) as tree:
        for _ in tree.follow():
            if time.monotonic() > ends:
                break
        status = tree.poll()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith('{"engine')]
    if status == 0 and lines:
        return json.loads(lines[-1])
    return {"engine_status": TIME_UP if status is None else status, "engine_errors": last_errors(log)}


def python_path() -> str:
    """``PYTHONPATH`` by which a process finds this folder's modules wherever it starts."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def derived(found: dict, sequences: int) -> dict:
    """Rates, and what no phase has, of a run's figures."""
    if not found.get("gen_s"):
        return {}
    known = sum(found.get(f"{phase}_s") or 0 for phase in ("gen", "old_log_prob", "update_actor", "update_weights"))
    rate = sequences * found["response_length"] / found["gen_s"]
    alone = found.get("engine_tokens_per_s")
    return {
        "rest_s": found["step_s"] - known,
        "gen_tokens_per_s": rate,
        **({"of_the_engine": rate / alone} if alone else {}),
    }


def fastest(results: Results, model: str, response: int) -> float:
    """Seconds of the fastest row of this job so far; 0 where none has ended well."""
    job = {"model": model, "response": response, "status": 0}
    took = [run["seconds"] for run in results.runs if job.items() <= run.items()]
    return min(took, default=0.0)


def take_row(
    row: str, options: argparse.Namespace, model: Path, data: Path, ends: float, needed: Callable[[], float]
) -> dict:
    """Figures and exit status of one row: a run of verl, then its engine alone. ``needed``: seconds at least."""
    if reason := lacking(row, options.tiny, options.model):
        return {"status": None, "errors": [reason]}
    if ends - time.monotonic() < needed():
        return not_begun()
    settings = "".join(f"-{word.rpartition('.')[2]}" for word in options.set)
    paths = RunPaths(options.out / "runs" / f"{model.name}-{options.response}-{row}{settings}")
    fresh_folder(paths)
    words = words_of(row, options, model, data, paths)
    found = run_verl([*VERL, *words], environment_of(paths, options.tiny), paths, options.steps, ends)
    if found["steps"] and row in options.engine_rows and time.monotonic() < ends:
        found |= measured_alone(options.tiny, paths, ends)
    return {"words": words, **found, **derived(found, options.sequences)}


def main(words: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?")
    parser.add_argument("--model", choices=PUBLISHED, default="qwen3_4b")
    parser.add_argument("--layers", type=int, help="instead of the model's number, and a part of its name in the table")
    parser.add_argument("--response", type=int, help="tokens of a response, 4096 if not set")
    parser.add_argument("--sequences", type=int, help="of a step, 64 if not set")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{STEPS} if not set; at least 2 to leave one out")
    parser.add_argument("--memory", type=float, default=0.45, help="vLLM's share of the GPU's memory")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, separated by commas")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that this call may take, no limit if not set")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of verl's")
    parser.add_argument("--engine-rows", help="whose engine is measured alone, too; all if not set")
    parser.add_argument("--no-engine", action="store_true", help="leave out the engine alone")
    parser.add_argument("--again", action="store_true", help="also rows that have ended well already")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="verl_step.json of others")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try this out")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.engine:
        engine_alone(options.engine)
        return 0
    if options.out is None:
        parser.error("name the folder OUT")
    rows = options.rows.split(",")
    options.engine_rows = [] if options.no_engine else (options.engine_rows or options.rows).split(",")
    if unknown := {*rows, *options.engine_rows} - set(ROWS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(ROWS)}")
    response, sequences = SIZES[options.tiny]
    options.response = options.response or response
    options.sequences = options.sequences or sequences
    if options.sequences % SAMPLES:
        parser.error(f"--sequences {options.sequences} is no multiple of {SAMPLES}")
    out = options.out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    kept = ("sequences", "steps", "memory", "tiny")
    settings = {name: getattr(options, name) for name in kept}
    results = Results(out / "verl_step.json", ("model", "response", "row"), settings, provenance())
    add_files(results, options.add, parser.error)
    ends = began + options.seconds
    shape = options.model + (f"-{options.layers}_layers" if options.layers else "")
    named = [
        ({"model": shape, "response": options.response, "row": " ".join([row, *options.set])}, row) for row in rows
    ]
    named = [(name, row) for name, row in named if options.again or not results.done(name)]
    columns = (*(name for name in FIGURES if name not in ("grad_norm", "ref_s")), "rest_s")
    columns += ("gen_tokens_per_s", "engine_tokens_per_s", "of_the_engine")
    if not named:
        results.show(columns, console)
        return 0
    model, data = out / "models" / shape, out / "data"
    compiled = compile_bytecode(console)
    if not (model / "tokenizer.json").exists():
        write_model_apart(options.model, model, options.tiny, options.layers)
    if not data.exists():
        write_data("gsm8k", out / "raw", rows=options.sequences * options.steps)
        prepare = [sys.executable, "-m", "recipes.gsm8k.prepare_data", "--local-dir", out / "raw", "--out", data]
        subprocess.run(prepare, cwd=ROOT, check=True)
    compiled()
    needed = functools.partial(fastest, results, shape, options.response)
    runs = [(name, functools.partial(take_row, row, options, model, data, ends, needed)) for name, row in named]
    return take_all(results, runs, columns, ends, console)


if __name__ == "__main__":
    sys.exit(main())
