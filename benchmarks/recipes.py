# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every recipe takes real steps by its own script on one GPU: ``benchmarks/recipes_on_gpu.sh OUT [run ...]``.

    benchmarks/recipes_on_gpu.sh OUT                                  # every run below, more than an hour on one H200
    benchmarks/recipes_on_gpu.sh OUT gsm8k deepscaler_8k:jet_fp8      # these; a recipe alone means its precisions
    benchmarks/recipes_on_gpu.sh OUT gsm8k:bf16 --seconds 580         # of a call that may take ten minutes
    benchmarks/recipes_on_gpu.sh OUT --tiny gsm8k:bf16                # two narrow layers on a CPU, to try this out

A run is a recipe's script with ``GPUS_PER_NODE=1``, a model of the published shape with random weights and data in the
published format (published_shapes.py). Changed are the batch, where one GPU asks for it the rollout's share of memory,
where parameters and optimizer are kept while others work, the optimizer's moments (8 bits at 7B and 8B), how long
validation is, what is saved (the policy that deepscaler's second stage starts from, else nothing: 50 GB at 8B), and
the reward, which a coin decides after the recipe's own was computed (coin_reward.py). All of it is printed with the
run.

OUT gets ``recipes.json``, after each run, and each run's log and metrics; a later call with the same OUT adds to it.
The table at the end has the median seconds of each phase behind the first step; ``k3 kl`` is the largest of all steps.
A run that fails does not stop the next. Exit status 1 if one failed, or took too few steps.

``--seconds`` is how long a call may take: the run that is under way then is ended, and the steps that it logged count.
``--no-validation`` leaves out the validation behind the last step, whose responses are as long as a step's.
"""

import argparse
import functools
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.published_shapes import SHARED_ON_A_CPU, is_mixture, write_data, write_model_apart
from benchmarks.verl_runs import FIGURES, Results, environment_of, fresh_folder, run_verl, take_all
from jetrl_verl.tools.demo.overrides import words_on_a_cpu
from jetrl_verl.tools.launch import RunPaths, quote
from jetrl_verl.tools.provenance import provenance

ROOT = Path(__file__).parents[1]
STEPS = 3
PRECISIONS = ("bf16", "fp8_rollout", "jet_fp8")
EXACT = "jet_fp8_exact"

EIGHT_BIT = (
    "actor_rollout_ref.actor.optim.optimizer_impl=torchao.optim",
    "actor_rollout_ref.actor.optim.optimizer=AdamW8bit",
)
OFFLOAD = (
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
)
"""7B and 8B: FP32 weights, gradients and both moments would be 16 bytes a parameter beside the rollout's."""

LESS_CACHE = ("actor_rollout_ref.rollout.gpu_memory_utilization=0.7",)
"""1.5B: weights and moments, 21 GB, stay on the GPU beside the rollout, and no other GPU holds a part of them. With the
recipe's 0.85 the two need more than an H200 has, from the second step on."""


@dataclass(frozen=True)
class Recipe:
    """One script with what one GPU needs.

    Attributes:
        script: below recipes/. model: of ``PUBLISHED``. data: recipe whose raw data it uses. prompts: a step's,
        ``samples`` responses each; ``None`` leaves the recipe's. settings: variables that the script reads.
        words: further overrides. precisions: that it runs under.
        continues: recipe whose policy, saved last, this one starts from. saves: whether another one starts from its.
    """

    script: str
    model: str
    data: str
    prompts: int
    samples: int
    settings: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    precisions: tuple[str, ...] = PRECISIONS
    continues: str = ""
    saves: bool = False


def _math(script: str, model: str, **settings: str) -> Recipe:
    return Recipe(f"jetrl_paper/{script}", model, "jetrl_paper", 4, 5, settings, (*EIGHT_BIT, *OFFLOAD))


RECIPES: dict[str, Recipe] = {
    "gsm8k": Recipe(
        "gsm8k/run_qwen3_8b.sh",
        "qwen3_8b",
        "gsm8k",
        prompts=16,
        samples=5,
        words=(*EIGHT_BIT, *OFFLOAD),
        precisions=(*PRECISIONS, EXACT),
    ),
    "deepscaler_8k": Recipe(
        "deepscaler/run_r1_distill_qwen_1_5b.sh",
        "r1_distill_qwen_1_5b",
        "deepscaler",
        prompts=4,
        samples=8,
        settings={"STAGE": "8k"},
        words=LESS_CACHE,
        precisions=(*PRECISIONS, EXACT),
        saves=True,
    ),
    "deepscaler_16k": Recipe(
        "deepscaler/run_r1_distill_qwen_1_5b.sh",
        "r1_distill_qwen_1_5b",
        "deepscaler",
        prompts=2,
        samples=16,
        settings={"STAGE": "16k"},
        words=LESS_CACHE,
        continues="deepscaler_8k",
    ),
    "dapo_7b": Recipe(
        "dapo/run_qwen2_5_7b.sh",
        "qwen2_5_7b",
        "dapo",
        prompts=4,
        samples=4,
        settings={"MAX_RESPONSE_LENGTH": "8192", "SP": "1"},
        words=EIGHT_BIT,  # the script offloads by itself
    ),
    # 30B parameters and their moments take more than one GPU: the same recipe with a model of its proportions.
    "qwen3_moe": Recipe("qwen3_moe/run_qwen3_30b_a3b_base.sh", "qwen3_moe_3b", "qwen3_moe", prompts=16, samples=5),
    "paper_qwen3_8b": _math("run_qwen3_8b_base.sh", "qwen3_8b", RESPONSE="8k"),
    "paper_qwen2_5_7b": _math("run_qwen2_5_7b.sh", "qwen2_5_7b", RESPONSE="8k"),
    "paper_llama3_1_8b": _math("run_llama3_1_8b.sh", "llama3_1_8b", RESPONSE="8k", DATASET="deepmath"),
}

SAME = (
    # Where the rollout's log-probabilities are not asked for, there is no k3_kl; the other precisions set it.
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "trainer.val_before_train=False",
    f"trainer.total_training_steps={STEPS}",
    f"reward.custom_reward_function.path={quote(ROOT / 'benchmarks/coin_reward.py')}",
    "reward.custom_reward_function.name=compute_score",
)
"""Overrides of every run."""

NOTHING_SAVED = ("trainer.save_freq=-1",)

DISK = 25e9
"""Bytes that the largest model and what a run writes take."""

TINY = (
    "data.max_prompt_length=384",
    "data.max_response_length=32",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "actor_rollout_ref.actor.optim.optimizer_impl=torch.optim",
    "actor_rollout_ref.actor.optim.optimizer=AdamW",
    # verl's FSDP2 keeps what is offloaded, a reference policy among it, in pinned memory, which takes a GPU driver.
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
)
console = Console(width=170)


@dataclass(frozen=True)
class Job:
    """What all runs share: where they write, and whether they are ``tiny`` ones on a CPU."""

    out: Path
    tiny: bool
    validates: bool = True
    ends: float = math.inf

    def model(self, name: str) -> Path:
        """Folder of a model, written where it is not there yet; where the disk is nearly full, the others go first."""
        folder = self.out / "models" / name
        if not (folder / "tokenizer.json").exists():
            if shutil.disk_usage(self.out).free < DISK and not self.tiny:
                shutil.rmtree(folder.parent, ignore_errors=True)
            write_model_apart(name, folder, self.tiny)
        return folder

    def data(self, recipe: str) -> Path:
        """Folder of a recipe's data, prepared by the recipe's own program."""
        folder = self.out / "data" / recipe
        if not folder.exists():
            raw = self.out / "raw" / recipe
            write_data(recipe, raw)
            prepare = [sys.executable, "-m", f"recipes.{recipe}.prepare_data", "--local-dir", raw, "--out", folder]
            subprocess.run(prepare, cwd=ROOT, check=True)
        return folder

    def paths(self, name: str, precision: str) -> RunPaths:
        """Files of a run."""
        return RunPaths(self.out / "runs" / f"{name}-{precision}")

    def start_of(self, recipe: Recipe, precision: str) -> Path:
        """Folder of the policy that a run starts from."""
        if not recipe.continues:
            return self.model(recipe.model)
        saved = self.paths(recipe.continues, precision).folder.rglob(f"global_step_{STEPS}/actor/huggingface")
        return next(saved, Path(f"{recipe.continues}:{precision} has not saved a policy"))

    def words(self, recipe: Recipe) -> list[str]:
        """Overrides of a run: the batch, what one GPU needs, what is the same for all, what a CPU needs."""
        saving = ("actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",) if recipe.saves else NOTHING_SAVED
        words = [
            f"data.train_batch_size={recipe.prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={recipe.prompts // 2}",
            f"actor_rollout_ref.rollout.n={recipe.samples}",
            *recipe.words,
            *SAME,
            *saving,
            f"trainer.test_freq={STEPS if self.validates else -1}",
        ]
        if self.tiny:
            words += [*TINY, *words_on_a_cpu()]
        return words

    def take_steps(self, name: str, precision: str) -> dict:
        """One run's figures and exit status."""
        recipe, paths = RECIPES[name], self.paths(name, precision)
        if recipe.continues and not self.start_of(recipe, precision).exists():
            return {"status": 1, "errors": [str(self.start_of(recipe, precision))]}
        fresh_folder(paths)
        environment = environment_of(paths, self.tiny)
        environment.pop("VERL_FILE_LOGGER_PATH")  # the script sets it
        environment |= recipe.settings
        environment |= {
            "PRECISION": precision,
            "GPUS_PER_NODE": "1",
            "DATA": str(self.data(recipe.data)),
            "MODEL_PATH": str(self.start_of(recipe, precision)),
            "OUT": str(paths.folder / "out"),
            "METRICS": str(paths.metrics),
            "PYTHON": sys.executable,
        }
        shared = [SHARED_ON_A_CPU] if self.tiny and precision == "jet_fp8" and is_mixture(recipe.model) else []
        words = [*self.words(recipe), *shared, f"hydra.run.dir={quote(paths.folder / 'hydra')}"]
        settings = " ".join(f"{key}={value}" for key, value in recipe.settings.items())
        say(f"{name} {precision}: {settings} {recipe.script} {' '.join(words)}")
        command = ["bash", str(ROOT / "recipes" / recipe.script), *words]
        return {"words": words, **run_verl(command, environment, paths, STEPS, self.ends)}


def chosen(words: Sequence[str]) -> list[tuple[str, str]]:
    """Runs that the command line asks for: ``RECIPE`` or ``RECIPE:PRECISION``; all where it names none.

    Raises:
        ValueError: a name that is no recipe.
    """
    runs = []
    for word in words or RECIPES:
        name, _, precision = word.partition(":")
        if name not in RECIPES:
            raise ValueError(f"{name} is not a recipe here. Choose from {', '.join(RECIPES)}.")
        runs += [(name, one) for one in ([precision] if precision else RECIPES[name].precisions)]
    return runs


def say(line: str) -> None:
    console.print(line, markup=False, highlight=False)


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("runs", nargs="*", metavar="RECIPE[:PRECISION]", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that this call may take, no limit if not set")
    parser.add_argument("--no-validation", action="store_true", help="leave out the validation behind the last step")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try this out")
    options = parser.parse_intermixed_args(words)
    job = Job(options.out.resolve(), options.tiny, not options.no_validation, began + options.seconds)
    job.out.mkdir(parents=True, exist_ok=True)
    try:
        runs = chosen(options.runs)
    except ValueError as error:
        parser.error(str(error))
    settings = {"build": provenance(), "tiny": job.tiny, "validates": job.validates}
    results = Results(job.out / "recipes.json", ("recipe", "precision"), settings)
    named = [({"recipe": name, "precision": precision}, (name, precision)) for name, precision in runs]
    steps = [(name, functools.partial(job.take_steps, *run)) for name, run in named]
    return take_all(results, steps, FIGURES, job.ends, console)


if __name__ == "__main__":
    sys.exit(main())
