# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every recipe takes real steps by its own script, one run after another, with a model of the published shape.

    python3 -m benchmarks.recipes OUT --seconds 560                     # every run below; again: those that are missing
    python3 -m benchmarks.recipes OUT gsm8k deepscaler_8k:jet_fp8       # these; a recipe alone means its precisions
    python3 -m benchmarks.recipes OUT gsm8k:jet_fp8 --gpus 8 --steps 10 --shipped
    python3 -m benchmarks.recipes OUT --tiny gsm8k:bf16                 # two narrow layers on a CPU, to try this out

Weights are random, data are made up in the published format (published_shapes.py), and a coin decides the reward after
the recipe's own was computed (coin_reward.py). Responses end after ``--mean-response`` tokens in the mean. The 7B and
8B models are cut to 8 layers and train with 8-bit moments, and each GPU gets the prompts of one GPU. ``--shipped``
keeps the script's layers, tokens and memory and scales its batch by GPUS/8, or to ``--prompts``. ``--set`` adds an
override, such as verl's offloading where the GPUs do not hold the optimizer next to the rollout.

OUT gets ``recipes.json`` after each run, and each run's log and metrics. A later call with the same OUT takes what has
not ended well with the same code (``--again``: all that it names). The table has the median seconds of each phase after
the first step; ``k3 kl`` is the largest of all steps. Exit status 1 if a run failed or took too few steps.
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.gpus import too_few, unfit
from benchmarks.published_shapes import ROOT, SHARED_ON_A_CPU, is_mixture, write_data, write_model_apart
from benchmarks.verl_runs import FIGURES, Results, compile_bytecode, environment_of, fresh_folder, run_verl, take_all
from jetrl_verl.tools.demo.overrides import words_of_a_local_ray, words_of_one_machine, words_on_a_cpu
from jetrl_verl.tools.launch import RunPaths, quote
from jetrl_verl.tools.provenance import provenance

STEPS = 3
PRECISIONS = ("bf16", "fp8_rollout", "jet_fp8")
LAYERS = 8
"""Of the 7B and 8B models: 2.8 to 3.0 billion parameters, two fifths of them the vocabulary's."""
MEAN_RESPONSE = 512
"""Tokens of a response. A random policy would go on to the end, 16,384 tokens in some recipes."""
SHIPPED_GPUS = 8
"""GPUs that the scripts were written for."""

EIGHT_BIT = (
    "actor_rollout_ref.actor.optim.optimizer_impl=torchao.optim",
    "actor_rollout_ref.actor.optim.optimizer=AdamW8bit",
)
OFFLOAD = (
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
)
NO_OFFLOAD = tuple(word.replace("True", "False") for word in OFFLOAD)


class Shipped(NamedTuple):
    """A script's own numbers, for ``SHIPPED_GPUS``: prompts of a step and of an update, samples of a prompt."""

    prompts: int
    update: int
    samples: int


@dataclass(frozen=True)
class Recipe:
    """One script with what one GPU needs.

    Attributes:
        script: below recipes/. model: of ``PUBLISHED``. data: recipe whose raw data it uses.
        prompts: a step's on one GPU, ``samples`` responses each. tokens: of a micro-batch.
        settings: variables that the script reads. words: further overrides. layers: all if None.
        precisions: that it runs under. shipped: the script's own numbers, None where they are not known here.
        continues: recipe whose saved policy this one starts from.
    """

    script: str
    model: str
    data: str
    prompts: int
    samples: int
    tokens: int
    settings: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    layers: int | None = None
    precisions: tuple[str, ...] = PRECISIONS
    continues: str = ""
    shipped: Shipped | None = None


def _cut(script: str, model: str, data: str, prompts: int, samples: int, tokens: int, **more) -> Recipe:
    """A 7B or 8B model with fewer layers and 8-bit moments."""
    return Recipe(script, model, data, prompts, samples, tokens, words=EIGHT_BIT, layers=LAYERS, **more)


def _paper(script: str, model: str, **settings: str) -> Recipe:
    return _cut(f"jetrl_paper/{script}", model, "jetrl_paper", 4, 5, 9216, settings={"RESPONSE": "8k", **settings})


def _deepscaler(stage: str, prompts: int, samples: int, tokens: int, continues: str = "") -> Recipe:
    script, model = "deepscaler/run_r1_distill_qwen_1_5b.sh", "r1_distill_qwen_1_5b"
    # Weights and moments, 21 GB, stay on the GPU next to the rollout.
    words, settings = ("actor_rollout_ref.rollout.gpu_memory_utilization=0.7",), {"STAGE": stage}
    return Recipe(script, model, "deepscaler", prompts, samples, tokens, settings, words, continues=continues)


RECIPES: dict[str, Recipe] = {
    "gsm8k": _cut(
        "gsm8k/run_qwen3_8b.sh",
        "qwen3_8b",
        "gsm8k",
        16,
        5,
        8192,
        precisions=(*PRECISIONS, "jet_fp8_exact"),
        shipped=Shipped(1024, 256, 5),
    ),
    "deepscaler_8k": _deepscaler("8k", 4, 8, 9216),
    # Of 4 samples one group in eight has equal rewards by chance, and its replacement is one more generation.
    "dapo_7b": _cut(
        "dapo/run_qwen2_5_7b.sh",
        "qwen2_5_7b",
        "dapo",
        4,
        8,
        10240,
        settings={"MAX_RESPONSE_LENGTH": "8192", "SP": "1"},
    ),
    "paper_qwen3_8b": _paper("run_qwen3_8b_base.sh", "qwen3_8b"),
    "deepscaler_16k": _deepscaler("16k", 2, 16, 17408, "deepscaler_8k"),
    "paper_qwen2_5_7b": _paper("run_qwen2_5_7b.sh", "qwen2_5_7b"),
    "paper_llama3_1_8b": _paper("run_llama3_1_8b.sh", "llama3_1_8b", DATASET="deepmath"),
    # 30B parameters and their moments take more than one GPU: the same recipe with a model of its proportions.
    "qwen3_moe": Recipe("qwen3_moe/run_qwen3_30b_a3b_base.sh", "qwen3_moe_3b", "qwen3_moe", 16, 5, 8192),
}
"""In the order in which a call takes them."""

SAME = (
    # Without the rollout's log-probabilities there is no k3_kl; the precisions other than bf16 set it.
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    f"reward.custom_reward_function.path={quote(ROOT / 'benchmarks/coin_reward.py')}",
    "reward.custom_reward_function.name=compute_score",
)
"""Overrides of every run."""

TINY = (
    "data.max_prompt_length=384",
    "data.max_response_length=32",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "actor_rollout_ref.actor.optim.optimizer_impl=torch.optim",
    "actor_rollout_ref.actor.optim.optimizer=AdamW",
    # verl's FSDP2 keeps what is offloaded, a reference policy among it, in pinned memory, which takes a GPU driver.
    "actor_rollout_ref.actor.use_kl_loss=False",
    *NO_OFFLOAD,
)
NAMES = ("recipe", "precision", "gpus", "of_steps")
console = Console(width=210)


@dataclass(frozen=True)
class Job:
    """What all runs of a call share; ``ends`` is when all has ended, by ``time.monotonic()``."""

    out: Path
    tiny: bool = False
    ends: float = math.inf
    mean_response: int = MEAN_RESPONSE
    gpus: int = 1
    steps: int = STEPS
    shipped: bool = False
    prompts: int | None = None
    set: tuple[str, ...] = ()

    def batch(self, recipe: Recipe) -> tuple[int, int]:
        """Prompts of a step and of an update: two updates a step, or as many as the script has."""
        if not self.shipped:
            prompts = self.prompts or recipe.prompts * self.gpus
            return prompts, prompts // 2
        prompts = self.prompts or recipe.shipped.prompts * self.gpus // SHIPPED_GPUS
        return prompts, prompts * recipe.shipped.update // recipe.shipped.prompts

    def model(self, recipe: Recipe) -> Path:
        """Folder of a recipe's model, written where it is not there yet."""
        layers = None if self.shipped or self.tiny else recipe.layers
        shape = f"{recipe.model}-{layers}_layers" if layers else recipe.model
        folder = self.out / "models" / f"{shape}-{self.mean_response}_tokens"
        write_model_apart(recipe.model, folder, self.tiny, layers, None if self.tiny else self.mean_response)
        return folder

    def data(self, recipe: Recipe) -> Path:
        """Folder of a recipe's data, prepared by the recipe's own program: as many problems as its steps need."""
        rows = max(64, self.batch(recipe)[0] * self.steps)
        folder = self.out / "data" / f"{recipe.data}-{rows}"
        if not folder.exists():
            raw, written = self.out / "raw" / folder.name, folder.with_name(f"{folder.name}.partial")
            write_data(recipe.data, raw, rows)
            module = f"recipes.{recipe.data}.prepare_data"
            prepare = [sys.executable, "-m", module, "--local-dir", raw, "--out", written]
            subprocess.run(prepare, cwd=ROOT, check=True)
            written.rename(folder)
        return folder

    def paths(self, name: str, precision: str) -> RunPaths:
        """Files of a run."""
        way = "-shipped" if self.shipped else ""
        return RunPaths(self.out / "runs" / f"{name}-{precision}-{self.gpus}_gpus-{self.steps}_steps{way}")

    def start_of(self, recipe: Recipe, precision: str) -> Path:
        """Folder of the policy that a run starts from."""
        if not recipe.continues:
            return self.model(recipe)
        saved = self.paths(recipe.continues, precision).folder.rglob(f"global_step_{self.steps}/actor/huggingface")
        return next(saved, Path(f"{recipe.continues}:{precision} has not saved a policy"))

    def words(self, name: str, precision: str) -> list[str]:
        """Overrides of a run: the batch, what the GPUs need, what is the same for all, what a CPU needs."""
        recipe, (prompts, update) = RECIPES[name], self.batch(RECIPES[name])
        saved = any(other.continues == name and precision in other.precisions for other in RECIPES.values())
        words = [
            f"data.train_batch_size={prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={update}",
            *([] if self.shipped else _sizes(recipe, prompts)),
            *SAME,
            f"trainer.total_training_steps={self.steps}",
            "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]" if saved else "trainer.save_freq=-1",
        ]
        if self.tiny:
            shared = [SHARED_ON_A_CPU] if precision == "jet_fp8" and is_mixture(recipe.model) else []
            words += [*TINY, *words_on_a_cpu(), f"++ray_kwargs.ray_init.num_gpus={self.gpus}", *shared]
        else:
            words += words_of_a_local_ray() if self.shipped else [*words_of_one_machine(), *NO_OFFLOAD]
        return [*words, *self.set]

    def take_steps(self, name: str, precision: str) -> dict:
        """One run's figures and exit status."""
        recipe, paths = RECIPES[name], self.paths(name, precision)
        policy = self.start_of(recipe, precision)
        if recipe.continues and not policy.exists():
            return {"status": 1, "errors": [str(policy)]}
        fresh_folder(paths)
        environment = environment_of(paths, self.tiny) | recipe.settings
        environment.pop("VERL_FILE_LOGGER_PATH")  # the script sets it
        environment |= {
            "PRECISION": precision,
            "GPUS_PER_NODE": str(self.gpus),
            "DATA": str(self.data(recipe)),
            "MODEL_PATH": str(policy),
            "OUT": str(paths.folder / "out"),
            "METRICS": str(paths.metrics),
            "PYTHON": sys.executable,
        }
        words = [*self.words(name, precision), f"hydra.run.dir={quote(paths.folder / 'hydra')}"]
        command = ["bash", str(ROOT / "recipes" / recipe.script), *words]
        gpus = 0 if self.tiny else self.gpus
        return {"words": words, **run_verl(command, environment, paths, self.steps, self.ends, gpus)}


def _sizes(recipe: Recipe, prompts: int) -> list[str]:
    """A batch and moments that are smaller than the script's."""
    return [
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={recipe.tokens}",
        f"actor_rollout_ref.rollout.n={recipe.samples}",
        f"actor_rollout_ref.rollout.max_num_seqs={prompts * recipe.samples}",
        *recipe.words,
    ]


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


def unfitting(job: Job, runs: Sequence[tuple[str, str]]) -> str:
    """Why a call's recipes, GPUs and batch do not go together; empty if they do."""
    for name in dict.fromkeys(name for name, _ in runs):
        recipe = RECIPES[name]
        if job.shipped and recipe.shipped is None:
            return f"--shipped is not supported with {name}, whose numbers are not known here. Leave it out."
        if reason := unfit(recipe.model, job.gpus, 1, quantized=False):
            return reason
        _, update = job.batch(recipe)
        samples = recipe.shipped.samples if job.shipped else recipe.samples
        if not update or update * samples % job.gpus:
            words = f"an update of {update} prompts is not supported with --gpus {job.gpus}"
            return f"{name}: {words}. Set other --prompts."
    return ""


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("runs", nargs="*", metavar="RECIPE[:PRECISION]", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that this call may take, no limit if not set")
    parser.add_argument("--gpus", type=int, default=1, help="of one host")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--shipped", action="store_true", help="the script's own numbers")
    parser.add_argument("--prompts", type=int, help="of a step, instead of what fits the GPUs")
    parser.add_argument("--mean-response", type=int, default=MEAN_RESPONSE, help="tokens")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of verl's")
    parser.add_argument("--again", action="store_true", help="also what has ended well already")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try this out")
    options = parser.parse_intermixed_args(words)
    kept = {name: getattr(options, name) for name in ("tiny", "mean_response", "shipped", "prompts", "set")}
    sizes = {"gpus": options.gpus, "steps": options.steps, "ends": began + options.seconds}
    job = Job(options.out.resolve(), **sizes, **{**kept, "set": tuple(options.set)})
    try:
        runs = chosen(options.runs)
    except ValueError as error:
        parser.error(str(error))
    if reason := unfitting(job, runs) or too_few(job.gpus, job.tiny):
        parser.error(reason)
    job.out.mkdir(parents=True, exist_ok=True)
    results = Results(job.out / "recipes.json", NAMES, kept, provenance())
    named = [(dict(zip(NAMES, (*run, job.gpus, job.steps), strict=True)), run) for run in runs]
    named = [(name, run) for name, run in named if options.again or not results.done(name)]
    if named:
        compile_bytecode(console)()
    return take_all(results, [(name, partial(job.take_steps, *run)) for name, run in named], FIGURES, job.ends, console)


if __name__ == "__main__":
    sys.exit(main())
