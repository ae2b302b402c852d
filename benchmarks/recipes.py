# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every recipe takes real steps by its own script on one GPU or more: ``benchmarks/recipes_on_gpu.sh OUT [run ...]``.

    benchmarks/recipes_on_gpu.sh OUT --plan                           # what each run plans with; takes none
    benchmarks/recipes_on_gpu.sh OUT --no-validation --seconds 560    # every run below, three at once; then again,
    benchmarks/recipes_on_gpu.sh OUT --no-validation --seconds 560    # which takes those that are missing
    benchmarks/recipes_on_gpu.sh OUT gsm8k deepscaler_8k:jet_fp8      # these; a recipe alone means its precisions
    benchmarks/recipes_on_gpu.sh OUT gsm8k:jet_fp8 --whole            # all 36 layers, by itself, offloading
    benchmarks/recipes_on_gpu.sh OUT gsm8k:jet_fp8 --gpus 8 --steps 10 --shipped     # as the script has it
    benchmarks/recipes_on_gpu.sh OUT --tiny gsm8k:bf16                # two narrow layers on a CPU, to try this out

A run is a recipe's script with ``GPUS_PER_NODE`` as ``--gpus`` says, 1 if it does not, a model of the published shape
with random weights and data in the published format (published_shapes.py). Runs share the GPUs (side_by_side.py): what
is asked is whether a recipe takes its steps, so their seconds are those of a GPU that others use, too. Changed are, and
printed with the run:

- the batch, so many prompts for each GPU, and the tokens of a micro-batch; layers of the 7B and 8B models (8 of 28 to
  36) and their moments (8 bits)
- the rollout's cache, which vLLM does not measure then, since others change the free memory meanwhile
- responses end, by a list of tokens in the model's generation config, after 512 tokens in the mean (--mean-response)
- helpers: one agent loop, one reward worker, no dashboard
- how long validation is, and what is saved: the policy that deepscaler's second stage starts from, else nothing
- the reward, which a coin decides after the recipe's own was computed (coin_reward.py)

``--shipped`` takes one run at a time with its script's own numbers: layers, tokens, the rollout's memory, helpers. The
batch and its updates are scaled by GPUS/8 (or to ``--prompts``), since 8 GPUs are what it was written for. Where the
GPUs do not hold weights and moments beside the rollout (4 of 80 GB; 4 of 141 GB do), these are on the host while others
work and a micro-batch is half as long; below 4 GPUs moments have 8 bits. Reward, length of responses, validation and
what is saved are as above.

``--whole`` takes one run at a time with all layers, parameters and optimizer on the host while others work, and the
recipe's share of the GPU for the rollout. OUT gets ``recipes.json`` after each run, and each run's log and metrics. A
later call with the same OUT takes what has not ended well with the same code (``--again``: all that it names), and
``--add FILE`` takes over the results of another machine of the same kind. The table at the end has the median seconds
of each phase behind the first step; ``k3 kl`` is the largest of all steps. A run that fails does not stop the next.
Exit status 1 if one failed, took too few steps or was left for want of time.

``--seconds`` is how long a call may take: runs under way then are ended, and the steps that they logged count. No run
begins in less time than half of the others needed. ``--no-validation`` leaves out the validation behind the last step,
whose responses are as long as a step's.
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.gpus import LEFT_FREE, gpu_gib, too_few, unfit
from benchmarks.published_shapes import PUBLISHED, SHARED_ON_A_CPU, is_mixture, write_data, write_model_apart
from benchmarks.recipe_memory import BUCKET, CACHE, GIB, Plan, plan, table_of_plans, words_of_cache
from benchmarks.side_by_side import Planned, SideBySide, one_at_a_time, take_one
from benchmarks.verl_runs import (
    FIGURES,
    Results,
    add_files,
    compile_bytecode,
    environment_of,
    fresh_folder,
    python_path,
    run_verl,
)
from jetrl_verl.tools.demo.overrides import words_of_a_local_ray, words_of_one_machine, words_on_a_cpu
from jetrl_verl.tools.launch import RunPaths, quote
from jetrl_verl.tools.process_tree import Interrupted, signals_raise
from jetrl_verl.tools.provenance import provenance

ROOT = Path(__file__).parents[1]
STEPS = 3
PRECISIONS = ("bf16", "fp8_rollout", "jet_fp8")
EXACT = "jet_fp8_exact"

AT_ONCE = 3
"""Runs that share a GPU of 140 GB and 16 cores: two of 54 GiB, or three of 45, and 38 GB of the host's memory each."""

LAYERS = 8
"""Of the 7B and 8B models, where runs share the GPU: 2.8 to 3.0 billion parameters, two fifths of them the
vocabulary's."""

MEAN_RESPONSE = 512
"""Tokens of a response: a random policy would go on to the end, 16,384 tokens in a recipe of these. Of 32 responses the
longest then has 2,000, and a step's generation takes as long as that one."""

EIGHT_BIT = (
    "actor_rollout_ref.actor.optim.optimizer_impl=torchao.optim",
    "actor_rollout_ref.actor.optim.optimizer=AdamW8bit",
)
OFFLOAD = (
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
)
"""A whole 7B or 8B: FP32 weights, gradients and both moments would be 16 bytes a parameter beside the rollout's."""

FP32_MOMENTS = (
    "actor_rollout_ref.actor.optim.optimizer_impl=torch.optim",
    "actor_rollout_ref.actor.optim.optimizer=AdamW",
)
NO_OFFLOAD = tuple(word.replace("True", "False") for word in OFFLOAD)
"""What takes ``EIGHT_BIT`` and ``OFFLOAD`` back."""

BESIDE_OTHERS = (
    *NO_OFFLOAD,
    *words_of_cache(CACHE),
    # Ray's bookkeeping in each run's own cluster: each actor claims a core, most of them wait.
    "ray_kwargs.ray_init.num_cpus=16",
)
"""Of runs that share the GPU. None offloads: three runs' parameters on the host are more than it has beside them."""

LESS_CACHE = ("actor_rollout_ref.rollout.gpu_memory_utilization=0.7",)
"""1.5B alone: weights and moments, 21 GB, stay on the GPU beside the rollout, and no other GPU holds a part of them.
With the recipe's 0.85 the two need more than an H200 has, from the second step on."""


class Shipped(NamedTuple):
    """A script's, for ``SHIPPED_GPUS``: prompts of a step and of an update, samples, tokens of a micro-batch."""

    prompts: int
    update: int
    samples: int
    tokens: int


@dataclass(frozen=True)
class Recipe:
    """One script with what one GPU needs.

    With several GPUs each gets the prompts that one has.

    Attributes:
        script: below recipes/. model: of ``PUBLISHED``. data: recipe whose raw data it uses. prompts: a step's,
        ``samples`` responses each. tokens: of a micro-batch, the longest prompt and response at least.
        settings: variables that the script reads. words: further overrides. alone: those of a ``--whole`` run.
        layers: of a run beside others, all if None. precisions: that it runs under.
        shipped: the script's own numbers, None where they have not been looked at.
        continues: recipe whose policy, saved last, this one starts from.
        stands_for: shape of ``PUBLISHED`` that the recipe names and one GPU does not hold; empty if ``model`` is it.
    """

    script: str
    model: str
    data: str
    prompts: int
    samples: int
    tokens: int
    settings: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    alone: tuple[str, ...] = OFFLOAD
    layers: int | None = None
    precisions: tuple[str, ...] = PRECISIONS
    continues: str = ""
    stands_for: str = ""
    shipped: Shipped | None = None


def _math(script: str, model: str, **settings: str) -> Recipe:
    return Recipe(f"jetrl_paper/{script}", model, "jetrl_paper", 4, 5, 9216, settings, EIGHT_BIT, layers=LAYERS)


def _deepscaler(stage: str, prompts: int, samples: int, tokens: int, continues: str = "") -> Recipe:
    script, model = "deepscaler/run_r1_distill_qwen_1_5b.sh", "r1_distill_qwen_1_5b"
    sizes, stage_of = (prompts, samples, tokens), {"STAGE": stage}
    return Recipe(script, model, "deepscaler", *sizes, stage_of, alone=LESS_CACHE, continues=continues)


RECIPES: dict[str, Recipe] = {
    "gsm8k": Recipe(
        "gsm8k/run_qwen3_8b.sh",
        "qwen3_8b",
        "gsm8k",
        prompts=16,
        samples=5,
        tokens=8192,
        words=EIGHT_BIT,
        layers=LAYERS,
        precisions=(*PRECISIONS, EXACT),
        shipped=Shipped(1024, 256, 5, 24576),
    ),
    "deepscaler_8k": _deepscaler("8k", 4, 8, 9216),
    "dapo_7b": Recipe(
        "dapo/run_qwen2_5_7b.sh",
        "qwen2_5_7b",
        "dapo",
        prompts=4,
        samples=8,  # of 4, one group in eight has equal rewards by chance, and its replacement is one more generation
        tokens=10240,
        settings={"MAX_RESPONSE_LENGTH": "8192", "SP": "1"},
        words=EIGHT_BIT,
        layers=LAYERS,
    ),
    "paper_qwen3_8b": _math("run_qwen3_8b_base.sh", "qwen3_8b", RESPONSE="8k"),
    "deepscaler_16k": _deepscaler("16k", 2, 16, 17408, "deepscaler_8k"),
    "paper_qwen2_5_7b": _math("run_qwen2_5_7b.sh", "qwen2_5_7b", RESPONSE="8k"),
    "paper_llama3_1_8b": _math("run_llama3_1_8b.sh", "llama3_1_8b", RESPONSE="8k", DATASET="deepmath"),
    # 30B parameters and their moments take more than one GPU: the same recipe with a model of its proportions.
    "qwen3_moe": Recipe(
        "qwen3_moe/run_qwen3_30b_a3b_base.sh",
        "qwen3_moe_3b",
        "qwen3_moe",
        prompts=16,
        samples=5,
        tokens=8192,
        stands_for="qwen3_30b_a3b",
    ),
}
"""What was asked for first stands first: a call whose time is up has taken that."""

SAME = (
    # Where the rollout's log-probabilities are not asked for, there is no k3_kl; the other precisions set it.
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "trainer.val_before_train=False",
    f"reward.custom_reward_function.path={quote(ROOT / 'benchmarks/coin_reward.py')}",
    "reward.custom_reward_function.name=compute_score",
)
"""Overrides of every run."""

SAVED = ("actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",)
NOTHING_SAVED = ("trainer.save_freq=-1",)

SHIPPED_GPUS, HALF_STATE, ROLLOUT_SHARE = 8, 4, 0.6
"""GPUs that the scripts were written for; those below which an 8B model's moments have 8 bits; the scripts' share of a
GPU's memory for the rollout."""

SMALLEST = 76.0
"""GiB of the smallest Hopper, which a plan is for that is made without a GPU."""

BEFORE = {"gpus": 1, "of_steps": STEPS, "shipped": False, "prompts": None}
"""What records say that were written before these settings were (``Results``)."""

NAMES = ("recipe", "precision", "gpus", "of_steps")
COLUMNS = (*FIGURES, "gpu_peak_gib")

DISK = 25e9
"""Bytes that the largest model, whole, and what a run writes take."""

TINY = (
    "data.max_prompt_length=384",
    "data.max_response_length=32",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    *FP32_MOMENTS,
    # verl's FSDP2 keeps what is offloaded, a reference policy among it, in pinned memory, which takes a GPU driver.
    "actor_rollout_ref.actor.use_kl_loss=False",
    *NO_OFFLOAD,
)
console = Console(width=210)


@dataclass(frozen=True)
class Job:
    """What all runs share: where they write, whether they are ``tiny`` ones on a CPU, how many there are at once, and
    whether a model keeps all its layers, which takes the GPU alone."""

    out: Path
    tiny: bool
    validates: bool = True
    ends: float = math.inf
    at_once: int = AT_ONCE
    whole: bool = False
    mean_response: int = MEAN_RESPONSE
    gpus: int = 1
    steps: int = STEPS
    shipped: bool = False
    prompts: int | None = None
    gib: float = field(default_factory=lambda: gib if math.isfinite(gib := gpu_gib()) else SMALLEST)

    @property
    def alone(self) -> bool:
        """Whether a run takes the GPUs alone, with all layers of its model."""
        return self.whole or self.shipped

    def batch(self, recipe: Recipe) -> tuple[int, int]:
        """Prompts of a step and of an update. Two updates a step, but for a script's own number."""
        if not self.shipped:
            prompts = self.prompts or recipe.prompts * self.gpus
            return prompts, prompts // 2
        ships = recipe.shipped
        prompts = self.prompts or ships.prompts * self.gpus // SHIPPED_GPUS
        return prompts, prompts * ships.update // ships.prompts

    def layers(self, recipe: Recipe) -> int | None:
        """Layers of the model of a run, all if None."""
        return None if self.alone or self.tiny else recipe.layers

    def plan(self, recipe: Recipe) -> Plan:
        """Memory that a run beside others takes."""
        return plan(recipe.model, recipe.layers, recipe.tokens, set(EIGHT_BIT) <= set(recipe.words), shards=self.gpus)

    def holds_state(self, recipe: Recipe) -> bool:
        """Whether the GPUs hold weights and moments beside the rollout, and an update of the script's micro-batches."""
        each = plan(recipe.model, None, recipe.shipped.tokens, self.gpus < HALF_STATE, shards=self.gpus)
        state = each.weights + each.moments + each.held + BUCKET / GIB
        return max(state + ROLLOUT_SHARE * (self.gib + LEFT_FREE), each.update) <= self.gib

    def model(self, recipe: Recipe) -> Path:
        """Folder of a recipe's model, written where it is not there yet. Where whole models have nearly filled the
        disk, the others go first; nobody reads them then."""
        layers = self.layers(recipe)
        shape = f"{recipe.model}-{layers}_layers" if layers else recipe.model
        folder = self.out / "models" / f"{shape}-{self.mean_response}_tokens"
        with one_at_a_time(folder):
            if not (folder / "tokenizer.json").exists():
                if self.alone and shutil.disk_usage(self.out).free < DISK:
                    for other in folder.parent.glob("*/"):
                        shutil.rmtree(other, ignore_errors=True)
                write_model_apart(recipe.model, folder, self.tiny, layers, None if self.tiny else self.mean_response)
        return folder

    def data(self, recipe: Recipe) -> Path:
        """Folder of a recipe's data, prepared by the recipe's own program: as many problems as its steps need."""
        rows = max(64, self.batch(recipe)[0] * self.steps)
        folder = self.out / "data" / f"{recipe.data}-{rows}"
        with one_at_a_time(folder):
            if not folder.exists():
                raw, written = self.out / "raw" / folder.name, folder.with_name(f"{folder.name}.partial")
                write_data(recipe.data, raw, rows)
                prepare = [
                    sys.executable,
                    "-m",
                    f"recipes.{recipe.data}.prepare_data",
                    "--local-dir",
                    raw,
                    "--out",
                    written,
                ]
                subprocess.run(prepare, cwd=ROOT, check=True)
                written.rename(folder)
        return folder

    def paths(self, name: str, precision: str) -> RunPaths:
        """Files of a run."""
        return RunPaths(self.out / "runs" / self.slug(name, precision))

    def slug(self, name: str, precision: str) -> str:
        """What names the files of a run."""
        way = "-shipped" if self.shipped else "-whole" if self.whole else ""
        return f"{name}-{precision}-{self.gpus}_gpus-{self.steps}_steps{way}"

    def name(self, name: str, precision: str) -> dict[str, str | int]:
        """What names a run in the results."""
        return {"recipe": name, "precision": precision, "gpus": self.gpus, "of_steps": self.steps}

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
            *([] if self.shipped else self._sizes(recipe, prompts)),
            *SAME,
            f"trainer.total_training_steps={self.steps}",
            *(SAVED if saved else NOTHING_SAVED),
            f"trainer.test_freq={self.steps if self.validates else -1}",
        ]
        if self.tiny:
            shared = [SHARED_ON_A_CPU] if precision == "jet_fp8" and is_mixture(recipe.model) else []
            ranks = f"++ray_kwargs.ray_init.num_gpus={self.gpus}"
            return [*words, *TINY, *words_on_a_cpu(), ranks, *shared]
        if self.shipped:
            half = recipe.shipped.tokens // 2
            fewer = [*OFFLOAD, f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={half}"]
            words += [] if self.holds_state(recipe) else fewer
            return [*words, *(EIGHT_BIT if self.gpus < HALF_STATE else ()), *words_of_a_local_ray()]
        if self.whole:
            return [*words, *words_of_one_machine(), *recipe.alone]
        return [*words, *words_of_one_machine(), *BESIDE_OTHERS, f"ray_kwargs.ray_init.num_cpus={16 * self.gpus}"]

    def _sizes(self, recipe: Recipe, prompts: int) -> list[str]:
        """A batch and moments that are smaller than the script's."""
        return [
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={recipe.tokens}",
            f"actor_rollout_ref.rollout.n={recipe.samples}",
            f"actor_rollout_ref.rollout.max_num_seqs={prompts * recipe.samples}",
            *recipe.words,
        ]

    def said(self, name: str, precision: str) -> str:
        """One line with all that is changed in a run."""
        recipe = RECIPES[name]
        settings = [f"{key}={value}" for key, value in recipe.settings.items()]
        layers, published = self.layers(recipe), PUBLISHED[recipe.model].fields["num_hidden_layers"]
        layers = "2 narrow" if self.tiny else f"{layers or published} of {published}"
        if self.shipped:
            prompts, _ = self.batch(recipe)
            scaled = f"{prompts} of the script's {recipe.shipped.prompts} prompts on {self.gpus} of {SHIPPED_GPUS} GPUs"
            layers = f"{scaled}, {layers}"
        of = f"{layers} layers of {recipe.model}, responses of about {self.mean_response} tokens, PRECISION={precision}"
        return f"{name} ({of}): {' '.join([*settings, recipe.script, *self.words(name, precision)])}"

    def environment(self, paths: RunPaths) -> dict[str, str]:
        """Of a run. Those beside others share the cores."""
        environment = environment_of(paths, self.tiny, self.at_once * self.gpus)
        environment.pop("VERL_FILE_LOGGER_PATH")  # the script sets it
        return environment

    def take_steps(self, name: str, precision: str) -> dict:
        """One run's figures and exit status."""
        recipe, paths = RECIPES[name], self.paths(name, precision)
        if recipe.continues and not self.start_of(recipe, precision).exists():
            return {"status": 1, "errors": [str(self.start_of(recipe, precision))]}
        fresh_folder(paths)
        environment = self.environment(paths) | recipe.settings
        environment |= {
            "PRECISION": precision,
            "GPUS_PER_NODE": str(self.gpus),
            "DATA": str(self.data(recipe)),
            "MODEL_PATH": str(self.start_of(recipe, precision)),
            "OUT": str(paths.folder / "out"),
            "METRICS": str(paths.metrics),
            "PYTHON": sys.executable,
        }
        words = [*self.words(name, precision), f"hydra.run.dir={quote(paths.folder / 'hydra')}"]
        command = ["bash", str(ROOT / "recipes" / recipe.script), *words]
        gpus = 0 if self.tiny else self.gpus
        return {"words": words, **run_verl(command, environment, paths, self.steps, self.ends, gpus)}

    def planned(self, name: str, precision: str) -> Planned:
        """A run as a program of its own."""
        recipe, folder = RECIPES[name], self.out / "programs"
        options = ["--at-once", str(self.at_once), "--mean-response", str(self.mean_response)]
        options += ["--gpus", str(self.gpus), "--steps", str(self.steps)]
        options += ["--prompts", str(self.prompts)] if self.prompts else []
        ways = (("--tiny", self.tiny), ("--whole", self.whole), ("--shipped", self.shipped))
        options += [word for word, chosen in ways if chosen]
        options += [] if self.validates else ["--no-validation"]
        one = f"{name}:{precision}"
        command = [sys.executable, "-m", "benchmarks.recipes", str(self.out), *options, "--one", one, "--seconds"]
        return Planned(
            self.name(name, precision),
            command,
            self.found(name, precision),
            folder / f"{self.slug(name, precision)}.log",
            0.0 if self.tiny or self.alone else self.plan(recipe).peak,
            self.name(recipe.continues, precision) if recipe.continues else None,
        )

    def found(self, name: str, precision: str) -> Path:
        """What a run's program leaves."""
        return self.out / "programs" / f"{self.slug(name, precision)}.json"


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
    if job.whole and job.shipped:
        return "--whole is not supported with --shipped. Set one of them."
    for name in dict.fromkeys(name for name, _ in runs):
        recipe = RECIPES[name]
        if job.shipped and recipe.shipped is None:
            known = ", ".join(name for name, other in RECIPES.items() if other.shipped)
            return f"--shipped is not supported with {name}, whose numbers are not known here. Set one of {known}."
        if job.shipped and job.gpus > SHIPPED_GPUS:
            return f"--gpus {job.gpus} is not supported with --shipped. Set {SHIPPED_GPUS} or fewer."
        if reason := unfit(recipe.model, job.gpus, 1, quantized=False):
            return reason
        _, update = job.batch(recipe)
        samples = recipe.shipped.samples if job.shipped else recipe.samples
        if not update or update * samples % job.gpus:
            return (
                f"{name}: an update of {update} prompts is not supported with --gpus {job.gpus}. Set other --prompts."
            )
    return ""


def say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_plans(job: Job, runs: Sequence[tuple[str, str]]) -> None:
    """The table of what each recipe plans with, and what is changed in each."""
    recipes = {name: (RECIPES[name], precision) for name, precision in reversed(runs)}
    rows = {}
    for name in [name for name in RECIPES if name in recipes]:
        recipe, precision = recipes[name]
        bits = "8 bits" if set(EIGHT_BIT) <= set(recipe.words) else "FP32"
        layers = str(recipe.layers or PUBLISHED[recipe.model].fields["num_hidden_layers"])
        rows[name] = (recipe.model, layers, bits, str(recipe.tokens)), job.plan(recipe)
        say(job.said(name, precision))
    if not job.tiny and not job.alone:
        console.print(table_of_plans(rows))


def take_side_by_side(job: Job, results: Results, runs: Sequence[tuple[str, str]]) -> int:
    """Take ``runs``, and the table of all that the file holds last, also behind a SIGTERM or a Ctrl-C."""
    show_plans(job, runs)
    compiled = compile_bytecode(console)
    job.model(RECIPES[runs[0][0]])  # meanwhile
    compiled()
    gib = math.inf if job.tiny or job.alone else gpu_gib()
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with signals_raise():
        try:
            beside = SideBySide(results, environment, job.at_once, gib, job.ends, console)
            return beside.take([job.planned(*run) for run in runs])
        except Interrupted as interrupted:
            return 128 + interrupted.signal
        finally:
            results.show(COLUMNS, console)


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("runs", nargs="*", metavar="RECIPE[:PRECISION]", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that this call may take, no limit if not set")
    parser.add_argument("--at-once", type=int, help=f"runs that share the GPU, {AT_ONCE} if not set, 1 with --whole")
    parser.add_argument("--gpus", type=int, default=1, help="of one host, 1 if not set")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{STEPS} if not set")
    parser.add_argument("--shipped", action="store_true", help="the script's own numbers, one run at a time")
    parser.add_argument("--prompts", type=int, help="of a step, instead of what fits the GPUs")
    parser.add_argument("--whole", action="store_true", help="all layers, one run at a time")
    parser.add_argument("--mean-response", type=int, default=MEAN_RESPONSE, help=f"tokens, {MEAN_RESPONSE} if not set")
    parser.add_argument("--no-validation", action="store_true", help="leave out the validation behind the last step")
    parser.add_argument("--again", action="store_true", help="also what has ended well already")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="FILE", help="recipes.json of other machines"
    )
    parser.add_argument("--plan", action="store_true", help="show what each run plans with, and take none")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try this out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(words)
    alone = options.whole or options.shipped
    if alone and (options.at_once or 1) > 1:
        parser.error("--at-once is not supported with --whole or --shipped: a whole model takes the GPU alone")
    at_once = options.at_once or (1 if alone else AT_ONCE)
    validates = not options.no_validation
    job = Job(
        options.out.resolve(),
        options.tiny,
        validates,
        began + options.seconds,
        at_once,
        options.whole,
        options.mean_response,
        options.gpus,
        options.steps,
        options.shipped,
        options.prompts,
    )
    job.out.mkdir(parents=True, exist_ok=True)
    try:
        runs = chosen([options.one] if options.one else options.runs)
    except ValueError as error:
        parser.error(str(error))
    if reason := unfitting(job, runs):
        parser.error(reason)
    if options.one:
        return take_one(job.found(*runs[0]), lambda: job.take_steps(*runs[0]))
    if options.plan:
        show_plans(job, runs)
        return 0
    kept = ("tiny", "validates", "whole", "mean_response", "shipped", "prompts")
    settings = {name: getattr(job, name) for name in kept}
    results = Results(job.out / "recipes.json", NAMES, settings, provenance(), BEFORE)
    add_files(results, options.add, parser.error)
    if not options.again:
        runs = [run for run in runs if not results.done(job.name(*run))]
    if not runs:
        results.show(COLUMNS, console)
        return 0
    if reason := too_few(job.gpus, job.tiny):
        parser.error(reason)
    return take_side_by_side(job, results, runs)


if __name__ == "__main__":
    sys.exit(main())
