# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of docs/evidence.md: verl trains the warmed-up policy under one arm, loss and seed.

    CUDA_VISIBLE_DEVICES=0 python3 -m benchmarks.evidence.run OUT jet_fp8@0.1:grpo:1 --seconds 1400
    python3 -m benchmarks.evidence.run OUT bf16:grpo:1 --tiny   # four updates on a CPU

A run is ``ARM[@SIGMA[stays]]:LOSS:SEED``, with an arm of ``ARMS`` and a loss of ``LOSSES``; ``@SIGMA`` adds noise of
this size to the rollout's weights (dose.py), drawn anew at every sync or, with ``stays``, once. OUT is the folder that
``benchmarks.evidence.policy`` filled. A run leaves ``OUT/results/RUN.jsonl``: a line of what it was, then one of each
rollout's metrics, written as verl logs them, so that a machine's end loses none.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.evidence import dose, task
from benchmarks.evidence.policy import FULL, TINY, is_complete, write_planted
from benchmarks.published_shapes import ROOT
from benchmarks.steps import TIME_UP, run_verl
from jetrl_verl.inputs import UserError
from jetrl_verl.tools.compare.run import SEED_KEYS
from jetrl_verl.tools.demo.cache import Prepared
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.launch import RunPaths, build_environment, choose_device, quote
from jetrl_verl.tools.process_tree import signals_raise
from jetrl_verl.tools.progress import last_errors
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.tools.report import MISMATCH, REWARD, STEP_SECONDS, Run, accuracy_keys, read_metrics

ARMS = {
    "bf16": ["bf16"],
    "fp8_rollout": ["fp8_rollout"],
    "fp8_rollout_tis": ["fp8_rollout_tis"],
    "int8_rollout": ["int8_rollout"],
    "jet_fp8_stock": ["jet_fp8", "jetrl.operations=stock"],
    "jet_fp8": ["jet_fp8", "jetrl.operations=shared"],
    "jet_fp8_cache": ["jet_fp8", "jetrl.operations=shared", "jetrl.kv_cache=fp8"],
    "jet_fp8_calibrated": ["jet_fp8", "jetrl.operations=shared", "clip=calibrated"],
}
"""Arm -> precision and overrides. No arm but ``fp8_rollout_tis`` has a correction of the mismatch."""

FACTOR = 2**16.5
"""Of the planted outliers."""

RATES = {"grpo": 1e-5, "reinforce": 1e-5}
"""Learning rate of each loss."""

LOSSES = {
    "grpo": [],
    # -A log pi of GRPO's groups, without a ratio and so without a clip.
    "reinforce": ["actor_rollout_ref.actor.policy_loss.loss_mode=gpg", "algorithm.norm_adv_by_std_in_grpo=False"],
}

METRICS = {
    "score": REWARD,
    "k3_kl": MISMATCH,
    "clipped": "actor/pg_clipfrac",
    "entropy": "actor/entropy",
    "length": "response_length/mean",
    "grad_norm": "actor/grad_norm",
    "seconds": STEP_SECONDS,
    "gen": "timing_s/gen",
    "old_log_prob": "timing_s/old_log_prob",
    "update_actor": "timing_s/update_actor",
    "update_weights": "timing_s/update_weights",
}
"""Key of a line of results -> verl's metric."""


@dataclass(frozen=True)
class Sizes:
    """Of a run: rollouts, prompts of each, responses to one, updates on a rollout, rate, tokens of a micro-batch."""

    rollouts: int = 75
    prompts: int = 32
    group: int = 8
    updates: int = 4
    lr: float = 1e-5
    tokens: int = 16384


TINY_RUN = Sizes(rollouts=2, prompts=4, group=4, updates=2, tokens=4096)


@dataclass(frozen=True)
class Trial:
    """A run: an arm, its dose, loss and seed."""

    name: str
    sigma: float
    stays: bool
    loss: str
    seed: int

    @classmethod
    def parse(cls, text: str) -> "Trial":
        """The run that ``text`` stands for. Raises ``UserError`` if it names none, or a dose without a contract."""
        match = re.fullmatch(r"(\w+)(?:@(\d+(?:\.\d+)?(?:e-?\d+)?)(stays)?)?:(\w+):(\d+)", text)
        if match is None or match[1] not in ARMS or match[4] not in LOSSES:
            raise UserError(
                f"{text!r} is not a run. Give ARM[@SIGMA[stays]]:LOSS:SEED with an arm of {', '.join(ARMS)} and a loss "
                f"of {', '.join(LOSSES)}."
            )
        if match[2] and match[1] == "bf16":
            raise UserError(f"{text!r} has a dose, which verl's own weight sync does not add. Give an arm of jet_fp8.")
        return cls(match[1], float(match[2] or 0), bool(match[3]), match[4], int(match[5]))

    @property
    def arm(self) -> str:
        """Arm and dose, which the seeds share."""
        return self.name + (f"@{self.sigma:g}{'stays' * self.stays}" if self.sigma else "")

    def __str__(self) -> str:
        return f"{self.arm}:{self.loss}:{self.seed}"

    @property
    def slug(self) -> str:
        """For names of files."""
        return str(self).replace(":", "-").replace("@", "-")

    def results(self, out: Path) -> Path:
        """The file of its results."""
        return out / "results" / f"{self.slug}.jsonl"


def words_of(run: Trial, sizes: Sizes, levels: tuple[int, ...], out: Path, policy: Path, device: str) -> list[str]:
    """Overrides of verl for a run; those of the demo come first."""
    prepared, paths = Prepared(out, {}), RunPaths(out / "runs" / run.slug)
    prompt, response = task.token_limits(levels)
    words = {
        "actor_rollout_ref.model.path": policy,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "data.train_batch_size": sizes.prompts,
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
        "actor_rollout_ref.actor.optim.lr": sizes.lr,
        "actor_rollout_ref.actor.ppo_mini_batch_size": sizes.prompts // sizes.updates,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": sizes.tokens,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.shuffle": True,  # without it data_loader_seed has no effect
        "actor_rollout_ref.rollout.n": sizes.group,
        "actor_rollout_ref.rollout.max_model_len": prompt + response,
        "actor_rollout_ref.rollout.max_num_seqs": sizes.prompts * sizes.group,
        "trainer.test_freq": sizes.rollouts,
        "trainer.save_freq": -1,
        "trainer.experiment_name": run.slug,
        **dict.fromkeys(SEED_KEYS, run.seed),
    }
    if device == "cuda":  # a fixed part of the GPU, and no sleep, which fails if another run takes memory meanwhile
        words |= {
            "actor_rollout_ref.rollout.gpu_memory_utilization": 0.05,
            "++actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes": 2_000_000_000,
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 64,  # 2 GB if not set
            "actor_rollout_ref.rollout.free_cache_engine": False,
            "++actor_rollout_ref.rollout.enable_sleep_mode": False,
        }
    if run.sigma:
        words["actor_rollout_ref.model.external_lib"] = dose.__name__
    precision, *settings = ARMS[run.name]
    demo = build_overrides(precision, prepared, paths, device, sizes.rollouts)
    return [*demo, *settings, *LOSSES[run.loss], *(f"{key}={quote(value)}" for key, value in words.items())]


def records_of(folder: Path) -> list[dict]:
    """A line per step that verl has logged so far; ``accuracy`` where the test problems were answered."""
    steps = sorted(read_metrics(folder).items())
    keys = METRICS | {"accuracy": next(iter(accuracy_keys([Run("", steps)]).values()), None)}
    return [{"step": step, **{name: data[key] for name, key in keys.items() if key in data}} for step, data in steps]


def settings_of(run: Trial, factor: float, sizes: Sizes) -> dict:
    """What a run is, as the first line of its results has it."""
    return {"arm": run.arm, "loss": run.loss, "seed": run.seed, "factor": factor, **vars(sizes)}


def take(run: Trial, out: Path, factor: float, tiny: bool, sizes: Sizes, ends: float) -> int:
    """Run verl and write the results; 1 unless it took all rollouts."""
    levels, device = (TINY if tiny else FULL).levels, choose_device("auto")
    paths = RunPaths(out / "runs" / run.slug)
    shutil.rmtree(paths.folder, ignore_errors=True)
    paths.folder.mkdir(parents=True)
    run.results(out).unlink(missing_ok=True)
    environment = build_environment(paths, device)
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else each run starts a compiler for every core
    # Workers import dose.py.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    if run.sigma:
        environment |= dose.Dose(run.sigma, run.stays, run.seed, sizes.rollouts).environment()
    words = words_of(run, sizes, levels, out, write_planted(out, factor), device)
    first = settings_of(run, factor, sizes) | {"tiny": tiny, "build": provenance()}
    run.results(out).parent.mkdir(exist_ok=True)
    began, logged = time.monotonic(), 0

    def save(**result: object) -> None:
        facts = first | {"seconds": round(time.monotonic() - began), **result}
        part = run.results(out).with_suffix(".part")
        part.write_text("\n".join(map(json.dumps, (facts, *records_of(paths.folder)))) + "\n")
        part.replace(run.results(out))

    def look() -> None:
        nonlocal logged
        size = paths.metrics.stat().st_size if paths.metrics.exists() else 0
        if size > logged:
            logged = size
            first.setdefault("started", round(time.monotonic() - began))
            save(status=TIME_UP)  # what it is if nobody comes to say more

    if (status := run_verl(words, environment, paths.log, ends, look)) is None:
        status = TIME_UP
    errors = last_errors(paths.log) if status not in (0, TIME_UP) else []
    save(status=status, errors=errors)
    print(f"{run}: status {status} after {time.monotonic() - began:.0f} s", *errors, sep="\n  ", flush=True)
    return int(status != 0)


def trials_of(texts: Sequence[str], out: Path, tiny: bool) -> list[Trial]:
    """The runs that ``texts`` stand for. Raises ``UserError`` if one stands for none, or ``out`` has no policy."""
    if not is_complete(TINY if tiny else FULL, out):
        raise UserError(f"{out} has no policy. Run `python3 -m benchmarks.evidence.policy {out}` first.")
    return [Trial.parse(text) for text in texts]


def sizes_of(run: Trial, options: argparse.Namespace) -> Sizes:
    """Of a run with the options of :func:`parser_of_runs`. Raises ``UserError`` if its prompts make no updates."""
    given = {key: value for key in ("rollouts", "prompts", "lr") if (value := getattr(options, key)) is not None}
    sizes = replace(TINY_RUN if options.tiny else Sizes(), **{"lr": RATES[run.loss], **given})
    if sizes.prompts % sizes.updates:
        raise UserError(f"{sizes.prompts} prompts are not {sizes.updates} equal updates. Give a multiple.")
    return sizes


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def parser_of_runs(description: str) -> argparse.ArgumentParser:
    """With the options that one run and a booking of several share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--factor", type=float, default=FACTOR, help="of the planted outliers")
    parser.add_argument("--rollouts", type=positive, help="75 if not set")
    parser.add_argument("--prompts", type=positive, help="of a rollout, a multiple of 4, 32 if not set")
    parser.add_argument("--lr", type=float, help="that of the loss if not set")
    parser.add_argument("--tiny", action="store_true", help="four updates of a small policy, for a CPU")
    parser.add_argument("--seconds", type=float, default=1e9, help="that this call may take")
    return parser


def main() -> int:
    began = time.monotonic()
    parser = parser_of_runs(__doc__)
    parser.add_argument("run", metavar="RUN")
    options = parser.parse_args()
    out = options.out.resolve()
    try:
        (run,) = trials_of([options.run], out, options.tiny)
        sizes = sizes_of(run, options)
    except UserError as error:
        parser.error(str(error))
    with signals_raise():
        return take(run, out, options.factor, options.tiny, sizes, began + options.seconds)


if __name__ == "__main__":
    sys.exit(main())
