# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step of real verl: a job by name under a precision, next to what a competent user runs instead.

    python3 -m benchmarks.steps OUT 3b bf16_best                       # one row a call; it ends within ten minutes
    python3 -m benchmarks.steps OUT 3b jet_fp8
    python3 -m benchmarks.steps OUT 3b jet_fp8+jetrl.kv_cache=fp8
    python3 -m benchmarks.steps OUT                                    # the table of all rows in OUT
    python3 -m benchmarks.steps OUT 3b jet_fp8 --tiny                  # two narrow layers on a CPU, to try it out
    python3 -m benchmarks.steps OUT 3b jet_fp8 --timeline              # traces of one step more, for timeline.py

GRPO on packed sequences with FSDP2, four responses to a prompt, no KL term. Weights are random, in a published shape.
Responses end by themselves: their mean is half of the longest. Rows:

- ``bf16_best``: BF16 with Liger, FlashAttention 3, and flash-linear-attention for Qwen3.5
- ``bf16_shared``: BF16 linear layers between this project's operations
- ``fp8_rollout``: our FP8 rollout with truncated importance weights, trainer as in ``bf16_best``;
  ``fp8_rollout+jetrl.kv_cache=fp8`` with an FP8 cache
- ``verl_fp8``: verl's own FP8 rollout with vLLM's FP8 cache, weights and trainer as in ``fp8_rollout``
- ``jet_fp8``, ``jet_fp8_exact``
- one of these with overrides, ``jet_fp8+jetrl.checkpointing=full`` (jetrl_verl/tools/rows.py); of ``async_1_7b`` verl's
  own sync is ``bf16_best+actor_rollout_ref.rollout.checkpoint_engine.backend=nccl``

The first two steps compile and are left out. The table has medians, of the whole step also the fastest and slowest.
Two rows are compared only if both took all timed steps on one host and the same GPU model within 30 minutes: in turn,
or side by side on GPUs that ``CUDA_VISIBLE_DEVICES`` gives to each. ``k3 kl`` is the largest of all steps, of an
asynchronous job of tokens that the current weights sampled.

Each call adds one line to ``OUT/steps.jsonl``; files of several machines are joined by ``cat``.
"""

import argparse
import fcntl
import importlib.util
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyarrow import parquet
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.published_shapes import ROOT, SHARED_ON_A_CPU, is_mixture, write_data, write_model_apart
from jetrl_verl.inputs import UserError, writing
from jetrl_verl.tools.bytecode import folders_without, start_compiling
from jetrl_verl.tools.commit import UNKNOWN
from jetrl_verl.tools.demo.overrides import words_of_a_local_ray, words_on_a_cpu
from jetrl_verl.tools.launch import VERL, RunPaths, build_environment, quote
from jetrl_verl.tools.process_tree import Interrupted, ProcessTree, signals_raise
from jetrl_verl.tools.progress import last_errors
from jetrl_verl.tools.provenance import nvidia_smi, provenance
from jetrl_verl.tools.report import read_metrics
from jetrl_verl.tools.rows import Row, parse_row

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{node}" for node in ("model", "actor", "rollout"))
VLLM = f"+{ROLLOUT}.engine_kwargs.vllm"
LEFT_OUT = 2
"""Steps that compile: the second has other row counts than the first."""
SAMPLES, PROMPT, TOKENS = 4, 512, 8192
"""Responses to a prompt, tokens of the longest prompt, tokens of a micro-batch on each GPU at least."""
MEAN = 0.627
"""With an end every ``0.627 L`` tokens the mean of responses of up to ``L`` is ``L / 2``."""
BOOKING = 30 * 60
"""Seconds in which two rows begin and end that are compared."""
TIME_UP = 124
"""Status of a row that was ended because its time was up, as of ``timeout``."""


@dataclass(frozen=True)
class Job:
    """What all rows of a job share.

    Attributes:
        model: of ``PUBLISHED``. gpus: of one host. tp: GPUs of one replica of the rollout.
        sequences: of a step. response: tokens of the longest one. updates: of a step. timed: steps.
        ulysses: GPUs that share a sequence in training. rollout_gpus: more GPUs, which sample asynchronously while
            ``gpus`` train; half a batch is ahead.
    """

    model: str
    gpus: int
    tp: int
    sequences: int
    response: int
    updates: int = 1
    timed: int = 4
    ulysses: int = 1
    rollout_gpus: int = 0

    @property
    def all_gpus(self) -> int:
        return self.gpus + self.rollout_gpus

    @property
    def steps(self) -> int:
        return LEFT_OUT + self.timed


JOBS: dict[str, Job] = {
    "3b": Job("qwen2_5_3b", 2, 2, 128, 3072, updates=2, ulysses=2),
    "8b": Job("qwen3_8b", 4, 2, 128, 3072, ulysses=2),
    "4b": Job("qwen3_4b", 2, 1, 64, 4096),
    "16k": Job("qwen3_4b", 2, 2, 16, 16384, timed=2, ulysses=2),
    "mixture_3b": Job("qwen3_moe_3b", 2, 1, 128, 2048),
    "sync_1_7b": Job("qwen3_1_7b", 2, 1, 128, 2048, updates=2),
    "async_1_7b": Job("qwen3_1_7b", 1, 1, 128, 2048, updates=2, rollout_gpus=1),
    "qwen3_5_4b": Job("qwen3_5_4b", 2, 1, 64, 2048),
    "qwen3_5_9b": Job("qwen3_5_9b", 2, 2, 64, 2048),
    "qwen3_5_4b_one_gpu": Job("qwen3_5_4b", 1, 1, 64, 2048),  # 64 GiB of weights, gradients and moments
}

FUSED = (f"{MODEL}.use_liger=True", f"++{MODEL}.override_config.attn_implementation=jetrl_varlen")
"""A BF16 trainer at its best; on Hopper ``jetrl_varlen`` is FlashAttention 3."""
TRUNCATED = ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2.0")
ROWS: dict[str, tuple[str, ...]] = {
    "bf16_best": ("precision=bf16", *FUSED),
    "bf16_shared": ("precision=bf16_shared",),
    "fp8_rollout": ("precision=fp8_rollout_tis", *FUSED),
    "verl_fp8": ("precision=bf16", *FUSED, *TRUNCATED, f"{ROLLOUT}.quantization=fp8", f"{VLLM}.kv_cache_dtype=fp8"),
    "jet_fp8": ("precision=jet_fp8",),
    "jet_fp8_exact": ("precision=jet_fp8_exact",),
}
"""Row -> overrides that make it."""
STOCK = ("bf16_best", "fp8_rollout", "verl_fp8")
"""Rows with transformers' and vLLM's own operations."""
BASELINES = {"bf16_best": ("bf16_best",), "FP8 rollout": ("fp8_rollout", "verl_fp8")}
"""Column of the table -> the rows whose fastest one is the baseline of its ratios."""
PHASES = ("gen", "old_log_prob", "update_actor", "update_weights", "step")
"""Of verl's ``timing_s/*``."""

console = Console(width=200)


def is_hybrid(job: Job) -> bool:
    """Whether a job's model has delta nets."""
    return job.model.startswith("qwen3_5")


def refused(job: Job, row: Row, tiny: bool) -> str:
    """Why a row cannot run on this machine; empty if it can."""
    if tiny:
        others = ", ".join(name for name in ROWS if name not in STOCK)
        words = f"{row.name} is not supported with --tiny: its kernels need a GPU. Name one of {others}."
        return words if row.name in STOCK else ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(nvidia_smi()) if visible is None else len(list(filter(None, visible.split(","))))
    if gpus < job.all_gpus:
        return f"This job takes {job.all_gpus} GPUs and this process has {gpus}. Name another job, or give it more."
    needed = {"liger_kernel": "liger-kernel", **({"fla": "flash-linear-attention"} if is_hybrid(job) else {})}
    missing = [package for module, package in needed.items() if not importlib.util.find_spec(module)]
    if row.name in STOCK and missing:
        return f"{row.name} is not at its best without {' and '.join(missing)}. Install it: pip install {missing[0]}."
    return ""


def words_of(
    job: Job, row: Row, model: Path, data: Path, paths: RunPaths, tiny: bool = False, timeline: bool = False
) -> list[str]:
    """verl's overrides for one row of a job; with ``timeline`` verl's profiler traces one step after the timed ones."""
    prompts = job.sequences // SAMPLES
    words = [
        *ROWS[row.name],
        f"data.train_files={quote(data / 'train.parquet')}",
        f"data.val_files={quote(data / 'test.parquet')}",
        f"data.train_batch_size={prompts}",
        "data.seed=1",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={job.response}",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        f"reward.custom_reward_function.path={quote(ROOT / 'benchmarks/coin_reward.py')}",
        "reward.custom_reward_function.name=compute_score",
        f"{MODEL}.path={quote(model)}",
        f"{MODEL}.use_remove_padding=True",
        f"{MODEL}.enable_gradient_checkpointing=True",
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.optim.lr=1e-6",
        f"{ACTOR}.ppo_mini_batch_size={prompts // job.updates}",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu={max(TOKENS, math.ceil((PROMPT + job.response) / job.ulysses))}",
        f"{ACTOR}.ulysses_sequence_parallel_size={job.ulysses}",
        f"{ACTOR}.use_kl_loss=False",
        f"{ACTOR}.entropy_coeff=0",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.n={SAMPLES}",
        f"{ROLLOUT}.tensor_model_parallel_size={job.tp}",
        f"{ROLLOUT}.gpu_memory_utilization={0.8 if job.rollout_gpus else 0.45}",
        f"{ROLLOUT}.max_model_len={PROMPT + job.response}",
        f"{ROLLOUT}.max_num_seqs={job.sequences}",
        f"{ROLLOUT}.calculate_log_probs=True",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={job.gpus}",
        f"trainer.total_training_steps={job.steps + timeline}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.project_name=jetrl-steps",
        f"trainer.experiment_name={row.slug}",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={quote(paths.folder / 'checkpoints')}",
        f"hydra.run.dir={quote(paths.folder / 'hydra')}",
    ]
    if tiny:
        words += [*words_on_a_cpu(), f"++ray_kwargs.ray_init.num_gpus={job.all_gpus}"]
        words += [f"ray_kwargs.ray_init.num_cpus={16 * job.gpus}"]
        words += [SHARED_ON_A_CPU] if row.name == "jet_fp8" and is_mixture(job.model) else []
    else:
        words += words_of_a_local_ray()
    if timeline:
        words += ["global_profiler.tool=torch", f"global_profiler.steps=[{job.steps + 1}]"]
        words += [f"global_profiler.save_path={quote(paths.folder / 'traces')}"]
        words += [f"{ACTOR}.profiler.enable=True", f"{ACTOR}.profiler.all_ranks=True"]
    if job.rollout_gpus:
        words += [
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.num_warmup_batches=0.5",
            f"trainer.v1.separate_async.parameter_sync_step={job.updates}",
            "actor_rollout_ref.hybrid_engine=False",
            f"{ROLLOUT}.nnodes=1",
            f"{ROLLOUT}.n_gpus_per_node={job.rollout_gpus}",
            f"{ROLLOUT}.checkpoint_engine.backend=jetrl",
        ]
    if is_hybrid(job) and row.name in STOCK:
        words.append(f"{VLLM}.language_model_only=True")
        if not importlib.util.find_spec("flashinfer"):
            words.append(f"{VLLM}.gdn_prefill_backend=triton")
    return [*words, *row.settings]


def prepare_data(out: Path, rows: int) -> Path:
    """Folder with so many prompts, or more, in the format of the gsm8k recipe."""
    data = out / "data"
    written = data / "train.parquet"
    if not written.exists() or parquet.read_metadata(written).num_rows < rows:
        write_data("gsm8k", out / "raw", rows=rows)
        prepare = [sys.executable, "-m", "recipes.gsm8k.prepare_data", "--local-dir", out / "raw"]
        subprocess.run([*prepare, "--out", data], cwd=ROOT, check=True)
    return data


def host() -> str:
    """Name and boot of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}-{boot.read_text()[:8] if boot.exists() else 'unknown'}"


def run_verl(
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    ends: float,
    look: Callable[[], None] = lambda: None,
) -> int | None:
    """Run verl until ``ends`` by ``time.monotonic()`` at most; its status, None where it was ended. ``look`` is called
    four times a second meanwhile."""
    # vLLM calls ninja by name.
    path = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), environment.get("PATH"))))
    with ProcessTree([*VERL, *words], {**environment, "PATH": path}, log) as tree:
        for _ in tree.follow():
            look()
            if time.monotonic() > ends:
                break
        return tree.poll()


def take_row(out: Path, name: str, row: Row, tiny: bool, timeline: bool, ends: float) -> dict:
    """Run verl for one row, until ``ends`` by ``time.monotonic()`` at most; the row's record."""
    job = replace(JOBS[name], sequences=16, response=24) if tiny else JOBS[name]
    missing = folders_without()
    compiling = start_compiling(missing)  # once on all cores; else each process of a fresh machine does it again
    model = out / "models" / (f"{job.model}-tiny-{job.gpus}" if tiny else f"{job.model}-{job.response}")
    with (out / "lock").open("w") as lock:  # a row side by side with this one waits for its model
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_model_apart(job.model, model, tiny, ends=round(MEAN * job.response), ranks=job.gpus)
        data = prepare_data(out, job.sequences // SAMPLES * (job.steps + timeline))
    if compiling is not None:
        compiling.wait()
    paths = RunPaths(out / "runs" / f"{name}-{row.slug}")
    shutil.rmtree(paths.folder, ignore_errors=True)
    paths.folder.mkdir(parents=True)
    words = words_of(job, row, model, data, paths, tiny, timeline)
    began = time.time()
    status = run_verl(words, build_environment(paths, "cpu" if tiny else "cuda"), paths.log, ends)
    record = {
        "job": name,
        "row": str(row),
        "tiny": tiny,
        "host": host(),
        "began": began,
        "ended": time.time(),
        "status": TIME_UP if status is None else status,
        **figures(sorted(read_metrics(paths.folder).items()), job),
        "words": [word.replace(f"{ROOT}/", "").replace(f"{out}/", "OUT/") for word in words],
        "build": provenance(),
    }
    record["complete"] = record["timed"] == job.timed
    record["errors"] = [] if record["complete"] else last_errors(paths.log)
    if status is None and not record["complete"]:
        record["errors"] = [f"ended after {record['ended'] - began:.0f} s, since its time was up"]
    return record


def figures(records: Sequence[tuple[int, Mapping]], job: Job) -> dict:
    """Seconds of each timed step by phase, medians of lengths, extremes of mismatch and memory.

    A step without a finite gradient is no step: it moved nothing.
    """
    steps = [data for _, data in records if math.isfinite(data.get("actor/grad_norm") or math.nan)]
    timed = steps[LEFT_OUT:][: job.timed]
    if not timed:
        return {"timed": 0}

    def largest(key: str) -> float | None:
        values = [data[key] for data in steps if data.get(key) is not None]
        return max(values, key=abs) if len(values) == len(steps) else None

    return {
        "timed": len(timed),
        "seconds": {phase: [data.get(f"timing_s/{phase}", 0.0) for data in timed] for phase in PHASES},
        "response_length": statistics.median(data["response_length/mean"] for data in timed),
        "at_the_limit": statistics.median(data["response_length/clip_ratio"] for data in timed),
        "k3_kl": largest("rollout_corr/lag_0/k3_kl" if job.rollout_gpus else "rollout_corr/k3_kl"),
        "peak_gib": largest("actor/perf/max_memory_allocated_gb"),
    }


def comparable(one: Mapping, other: Mapping) -> bool:
    """Whether two records may be divided: complete, of one job, host and GPU model, within one booking."""
    same = all(one[key] == other[key] for key in ("job", "tiny", "host"))
    span = max(one["ended"], other["ended"]) - min(one["began"], other["began"])
    return (
        same
        and one["complete"]
        and other["complete"]
        and one["build"]["gpu"] == other["build"]["gpu"]
        and span <= BOOKING
    )


def step_seconds(record: Mapping) -> float:
    """Median of a record's whole steps."""
    return statistics.median(record["seconds"]["step"])


def ratio(record: Mapping, records: Sequence[Mapping], names: Collection[str]) -> float | None:
    """Seconds of the fastest comparable row among ``names``, divided by the record's; None where there is none."""
    baselines = [
        other
        for other in records
        if other is not record and other["row"].partition("+")[0] in names and comparable(record, other)
    ]
    return min(map(step_seconds, baselines)) / step_seconds(record) if baselines else None


def append(file: Path, record: Mapping) -> None:
    """Add a record's line, which is one of its own also where a machine's end has cut the last one."""
    with file.open("a+") as lines:
        lines.seek(0)
        cut = lines.read()[-1:] not in ("", "\n")
        lines.write("\n" * cut + json.dumps(record) + "\n")


def read(file: Path) -> list[dict]:
    """All records; a line that was cut is named and left out."""
    records = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            words = f"line {number} of {file} was cut, so the table lacks its row. Take that row again."
            console.print(words, markup=False, highlight=False, soft_wrap=True)
    return records


def kept(records: Sequence[Mapping]) -> list[Mapping]:
    """All records but incomplete ones of which a later call took the same row on the same host."""

    def key(record: Mapping) -> tuple:
        return tuple(record[name] for name in ("job", "row", "tiny", "host"))

    later = [{key(record) for record in records[place + 1 :]} for place in range(len(records))]
    return [record for record, keys in zip(records, later) if record["complete"] or key(record) not in keys]


IDENTITY = ("commit", "dirty", "sources_sha256", "kernel_library_sha256")
"""Two records are of one build if these are the same."""


def described(build: Mapping[str, Any]) -> str:
    """A build in a few words."""
    commit, library = build["commit"], build["kernel_library_sha256"]
    words = f"commit {commit if commit == UNKNOWN else commit[:10]}"
    if build["dirty"] is not False:
        words += f"{' with changes' if build['dirty'] else ''} (sources {build['sources_sha256'][:8]})"
    return f"{words}, " + (f"kernel library {library[:8]}" if library else "no kernel library")


def builds_note(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The sentence under a table of ``records`` (name of a record -> its builds): which build made them."""
    groups: dict[tuple, tuple[str, list[str]]] = {}
    for name, builds in records.items():
        for build in builds:
            names = groups.setdefault(tuple(build[key] for key in IDENTITY), (described(build), []))[1]
            names.extend([name] if name not in names else [])
    if len(groups) <= 1:
        return "".join(f"Build: {words}." for words, _ in groups.values())
    listed = "; ".join(f"{words}: {', '.join(names)}" for words, names in groups.values())
    return f"Results of {len(groups)} builds side by side; a difference may come from the code. {listed}."


def show(records: Sequence[Mapping]) -> None:
    """Print the table of all records, then errors and builds."""
    columns = ("timed", "response", "at limit", *PHASES[:-1], "step", *(f"vs {name}" for name in BASELINES))
    shown = Table(box=SIMPLE_HEAD)
    for name in ("job", "row", "host", "GPU"):
        shown.add_column(name, no_wrap=True)
    for name in (*columns, "k3 kl", "GiB"):
        shown.add_column(name.replace("_", " "), justify="right", no_wrap=name == "step")
    for record in records:
        cells = [str(record["timed"])]
        if record["timed"]:
            phases = [f"{statistics.median(record['seconds'][phase]):.2f}" for phase in PHASES[:-1]]
            steps = record["seconds"]["step"]
            ratios = [ratio(record, records, names) for names in BASELINES.values()]
            cells += [f"{record['response_length']:.0f}", f"{record['at_the_limit']:.2f}", *phases]
            cells += [f"{step_seconds(record):.1f} ({min(steps):.1f} to {max(steps):.1f})"]
            cells += ["" if value is None else f"{value:.2f}x" for value in ratios]
            cells += ["" if record[name] is None else f"{record[name]:.3g}" for name in ("k3_kl", "peak_gib")]
        gpu = (record["build"]["gpu"] or "CPU").removeprefix("NVIDIA ")
        shown.add_row(record["job"], record["row"], record["host"], gpu, *cells)
    console.print(shown)
    for record in records:
        for line in record["errors"]:
            console.print(f"{record['job']} {record['row']}: {line}", markup=False, highlight=False, soft_wrap=True)
    builds: dict[str, list[Mapping]] = {}
    for record in records:
        builds.setdefault(f"{record['job']} {record['row']}", []).append(record["build"])
    console.print(builds_note(builds), markup=False, highlight=False, soft_wrap=True)


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("job", nargs="?", choices=JOBS, help="the table alone if not set")
    parser.add_argument("row", nargs="?", default="jet_fp8", help=f"of {', '.join(ROWS)}; jet_fp8 if not set")
    parser.add_argument("--seconds", type=float, default=560, help="that this call may take, 560 if not set")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try it out")
    parser.add_argument("--timeline", action="store_true", help="trace one step after the timed ones, for timeline.py")
    options = parser.parse_args(words)
    out = options.out.resolve()
    file, status = out / "steps.jsonl", 0
    if options.job:
        try:
            row = parse_row(options.row, ROWS, "a row")
            if reason := refused(JOBS[options.job], row, options.tiny):
                raise UserError(reason)
            with writing(out, "OUT"):
                out.mkdir(parents=True, exist_ok=True)
        except UserError as error:
            parser.error(str(error))
        with signals_raise():
            try:
                record = take_row(out, options.job, row, options.tiny, options.timeline, began + options.seconds)
            except Interrupted as interrupted:
                return 128 + interrupted.signal
        append(file, record)
        status = 0 if record["complete"] else record["status"] or 1
    elif not file.exists():
        parser.error(f"{file} does not exist: no row has run. Name a job and a row.")
    show(kept(read(file)))
    return status


if __name__ == "__main__":
    sys.exit(main())
