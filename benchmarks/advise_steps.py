# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a record of ``jetrl advise`` is (benchmarks/advise_rates.py), and the records in results of
benchmarks/verl_step.py and of ``--shipped`` runs of benchmarks/recipes.py."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published_shapes import PUBLISHED, is_mixture
from benchmarks.recipe_memory import GIB, sizes_of
from benchmarks.recipes import RECIPES, ROLLOUT_SHARE
from jetrl_verl.config.support.scopes import ACTOR, ATTENTION, ROLLOUT
from jetrl_verl.formats.catalog import UNQUANTIZED
from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.advise.gpus import GPUS, MEASURED
from jetrl_verl.tools.advise.job import MICRO_TOKENS, MOST_REQUESTS, Job
from jetrl_verl.tools.advise.predict import STOCK_VERL, Prediction, precisions, predict
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.rows import parse_row

RESULTS = Path(__file__).resolve().parent / "results"


@cache
def recorded(name: str) -> dict:
    """A record of benchmarks/results, by its file's name."""
    return json.loads((RESULTS / name).read_text())


@dataclass(frozen=True)
class Record:
    """One measured figure.

    Attributes:
        phase: of a step, or a part of one. case: model and sizes. measured: seconds, or GiB in ``memory``.
        calibrates: whether a rate was fitted to it; otherwise it checks. source: of the figure.
        predict: the same figure from rates.
        caveat: of what the measurement is that is not what is predicted; such a record neither calibrates nor checks.
    """

    phase: str
    case: str
    measured: float
    source: str
    predict: Callable[[Rates], float]
    calibrates: bool = False
    caveat: str = ""

    def error(self, rates: Rates) -> float:
        """(predicted - measured) / measured."""
        return self.predict(rates) / self.measured - 1


COLUMN_OF_ROW = {
    "bf16": "bf16",
    "bf16_best": "bf16, Liger",
    "bf16_shared": "bf16_shared",
    "fp8_rollout": "fp8_rollout",
    "jet_fp8": "jet_fp8",
    "jet_fp8_exact": "jet_fp8",
}
"""Row of benchmarks/verl_step.py -> column of a report; ``verl_fp8`` has none, for want of a rate."""

PHASE_OF_FIGURE = {
    "gen_s": "generation",
    "old_log_prob_s": "old log-probabilities",
    "ref_s": "reference",
    "update_actor_s": "update",
    "update_weights_s": "weight sync",
    "step_s": "step",
}
LONGEST_PROMPT = 512
"""Of benchmarks/verl_step.py."""
SHIPPED_LENGTHS = {"gsm8k": (512, 1024)}
"""Recipe -> longest prompt and response of its script."""
CALIBRATING = ("verl_step_4b_4k_h200.json", "verl_step_4b_1k_h200.json", "verl_step_8b_tp4_h200.json")
"""Jobs of 64, 256 and 16 sequences a GPU whose phases say what verl does around them; their generations and steps
check."""
CALIBRATING_ROWS = ("bf16", "jet_fp8")
VERLS_PARTS = {
    "old log-probabilities": "verl.old_log_prob",
    "update": "verl.update",
    "weight sync": "verl.sync",
}
"""Phase -> rate of what verl has around it."""
BY_SEQUENCES = ("verl.old_log_prob", "verl.update")
"""Rates that have a part for each sequence of a GPU, ``NAME.sequence``."""
MICRO = f"{ACTOR}.ppo_max_token_len_per_gpu"
CACHE = "jetrl.kv_cache"
COUNTS = ("trainer.n_gpus_per_node", "trainer.nnodes")


def given(words: Iterable[str]) -> dict[str, str]:
    """Key -> value of overrides on a command line. Of a key that is given twice the last word counts, as in Hydra."""
    found: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key.startswith("~"):
            found.pop(key[1:], None)
        else:
            found[key.lstrip("+")] = value
    return found


def key_of(name: str) -> str:
    """Of ``GPUS``, by what CUDA calls a GPU.

    Raises:
        ValueError: there is no prediction for it.
    """
    for key, gpu in GPUS.items():
        if name == gpu.name:
            return key
    raise ValueError(
        f"there is no prediction for the GPU {name}; known are {', '.join(g.name for g in GPUS.values())}."
    )


def column_of(text: str) -> str | None:
    """Column of a row of benchmarks/verl_step.py, which may name a cache, ``jet_fp8+jetrl.kv_cache=fp8``. None: there
    is none, or the row changes something else."""
    try:
        row = parse_row(text, COLUMN_OF_ROW)
    except ToolError:
        return None
    return COLUMN_OF_ROW[row.name] if given(row.settings).keys() <= {CACHE} else None


def offloads(said: Mapping[str, str]) -> bool:
    """Whether the actor's weights move to the host and back."""
    return said.get(f"{ACTOR}.fsdp_config.param_offload", "").lower() == "true"


def _job_of_run(run: dict, settings: dict) -> Job:
    """The job of one run of benchmarks/verl_step.py: packed, one update a step, sizes as its words say."""
    said = given(run["words"])
    micro = int(said.get(MICRO, max(MICRO_TOKENS, LONGEST_PROMPT + run["response"])))
    tp = int(said.get(f"{ROLLOUT}.tensor_model_parallel_size", 1))
    return Job(
        sizes_of(run["model"], None, tp),
        settings["sequences"] // 4,
        4,
        run["prompt_length"],
        min(run["response_length"], run["response"]),
        LONGEST_PROMPT,
        run["response"],
        gpus=math.prod(int(said.get(key, 1)) for key in COUNTS),
        tp=tp,
        utilization=float(said.get(f"{ROLLOUT}.gpu_memory_utilization", settings["memory"])),
        most=int(said.get(f"{ROLLOUT}.max_num_seqs", MOST_REQUESTS)),
        micro_tokens=micro,
        log_prob_tokens=int(said.get(f"{ROLLOUT}.log_prob_max_token_len_per_gpu", micro)),
        varlen=said.get(ATTENTION) == JETRL_ATTENTION,
        eight_bit=said.get(f"{ACTOR}.optim.optimizer") == "AdamW8bit",
        kv_cache=said.get(CACHE, UNQUANTIZED),
        gpu=key_of(settings["gpu"]) if "gpu" in settings else MEASURED,  # earlier records are all an H200's
    )


@dataclass(frozen=True)
class Replaced:
    """Code that has been replaced since records were made of it.

    Attributes:
        said: what it was. sources: sums of the sources (``sources_sha256``, their first eight digits) of the builds
            that had it, in the records that are read here and in advise_rates.py. A build's commit does not tell: a
            tree with changes has the commit that it was changed from.
    """

    said: str
    sources: tuple[str, ...]

    def in_build(self, build: Mapping[str, Any]) -> str:
        """What is said of a record of this build; empty if it has other code."""
        return self.said if build["sources_sha256"][:8] in self.sources else ""


OLD_ROLLOUT = Replaced(
    "a rollout with shared operations as before 455f00e: its attention, launches and clock have changed since",
    ("00a92b42", "5a02e0bd"),
)
OLD_SYNC = Replaced(
    "a weight sync as before 4f3bcb0, which gathered, quantized, summed and loaded a layer or a tensor at a time",
    ("00a92b42", "2f209b75", "67243d63", "7bde4f82"),
)

OLD_LOGITS = Replaced(
    "logits that are whole in FP32, as before 86699aa",
    ("00a92b42", "7bde4f82"),
)
WITHOUT_KERNELS = "a machine without this project's Hopper kernels"
BUSY_HOST = "a host on whose other GPUs another job of verl ran"
"""A weight sync maps and frees memory on every GPU, which one driver does for all of a host."""
BUSY = ("verl_step_8b_tp4_busy_h200.json",)
"""Files whose runs were taken there."""


def _caveat(
    phase: str, moved: bool, mixture: bool, busy: bool, code: str, rollout: str, trainer: str, sync: str
) -> str:
    """Of a phase's seconds: whether weights move in it, whether the model has experts, whether the host had another
    job, what is said of all that ran, of its rollout, of its trainer and of its weight sync."""
    if code:
        return code
    if mixture:
        return "a mixture, which no rate is for"
    if rollout and phase in ("generation", "step"):
        return rollout
    if trainer and phase in ("old log-probabilities", "reference", "update"):
        return trainer
    if sync and phase == "weight sync":
        return sync
    if busy and phase in ("weight sync", "step"):
        return BUSY_HOST
    return "weights that move to the host and back" if moved and phase != "generation" else ""


def _prediction(job: Job, column: str) -> Callable[[Rates], Prediction]:
    """The step of ``job`` under a column of the report, from rates."""
    (precision,) = [each for each in precisions(job, True) if each.name == column]
    return lambda rates: predict(rates, job, precision)


def _phase_records(
    run: Mapping[str, Any],
    case: str,
    source: str,
    predicted: Callable[[Rates], Prediction],
    calibrates: Callable[[str], bool],
    caveat: Callable[[str], str],
) -> Iterable[Record]:
    """A record of each phase that a run has a figure of; ``calibrates`` and ``caveat`` by the phase."""

    def seconds(rates: Rates, phase: str) -> float:
        found = predicted(rates)
        return found.step if phase == "step" else found.phases[phase].seconds

    for figure, phase in PHASE_OF_FIGURE.items():
        if run.get(figure) is not None:
            predict_phase = partial(seconds, phase=phase)
            yield Record(phase, case, run[figure], source, predict_phase, calibrates(phase), caveat(phase))


def shipped_records(file: Path) -> Iterable[Record]:
    """What ``--shipped`` runs of benchmarks/recipes.py say, each with the lengths that it had. BF16's weight sync
    calibrates what further replicas add, all else checks."""
    settings = json.loads(file.read_text())
    for run in settings["runs"]:
        recipe, said = RECIPES[run["recipe"]], given(run["words"])
        prompts, update = (int(said[key]) for key in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"))
        micro = int(said.get(MICRO, recipe.shipped.tokens))
        job = Job(
            sizes_of(recipe.model, None),
            prompts,
            recipe.shipped.samples,
            run["prompt_length"],
            run["response_length"],
            *SHIPPED_LENGTHS[run["recipe"]],
            gpus=run["gpus"],
            utilization=ROLLOUT_SHARE,
            micro_tokens=micro,
            log_prob_tokens=micro,
            mini_batches=prompts // update,
            varlen=True,
            eight_bit=said.get(f"{ACTOR}.optim.optimizer") == "AdamW8bit",
            reference=True,
        )
        case = f"verl, {run['recipe']}, {run['gpus']} GPUs, {prompts} x {recipe.shipped.samples}, {run['precision']}"
        caveat = "weights that move to the host and back" if offloads(said) else ""

        predicted = _prediction(job, run["precision"])
        yield from _phase_records(
            run,
            case,
            file.name,
            predicted,
            lambda phase, run=run: (phase, run["precision"]) == ("weight sync", "bf16"),
            lambda phase, caveat=caveat: "" if phase == "generation" else caveat,
        )
        yield Record(
            "memory",
            f"{case}, a trainer's peak",
            run["peak_gib"],
            file.name,
            lambda r, p=predicted: p(r).trainer.peak / GIB,
            caveat=caveat,
        )


def step_records(files: Iterable[Path]) -> Iterable[Record]:
    """What runs of benchmarks/verl_step.py say; those of ``CALIBRATING`` calibrate ``VERLS_PARTS``, all others check.

    Args:
        files: its results, as it writes them.

    Raises:
        ValueError: one of a tiny model on a CPU.
    """
    for file in files:
        settings = json.loads(file.read_text())
        if settings["tiny"]:
            raise ValueError(f"{file} has steps of a tiny model on a CPU, which no rate is for.")
        for run in settings["runs"]:
            cut = run["model"] not in PUBLISHED  # some of its layers
            name = column_of(run["row"])
            if cut or not run.get("steps") or name is None:
                continue
            job = _job_of_run(run, settings)
            moved = offloads(given(run["words"]))
            mixture = is_mixture(run["model"])
            build = run.get("build") or settings["build"]
            shared, ours = name in ("jet_fp8", "bf16_shared"), name not in STOCK_VERL
            over = f"{job.gpus} GPUs, TP {job.tp}, " if job.gpus > 1 else ""
            over += "" if job.gpu == MEASURED else f"{job.gpu.upper()}, "
            case = f"verl, {run['model']}, {over}{settings['sequences']} x {run['response']}, {run['row']}"
            case += ", beside another job" if file.name in BUSY else ""
            predicted = _prediction(job, name)
            fitted = file.name in CALIBRATING and run["row"] in CALIBRATING_ROWS
            # One job says what verl does around a sync; over several GPUs it has parts of its own (advise_sync.py).
            fitted_phases = [
                phase
                for phase in VERLS_PARTS
                if fitted and (file.name == CALIBRATING[0] or VERLS_PARTS[phase] in BY_SEQUENCES)
            ]
            in_triton = ours and build.get("kernel_library_sha256", "") is None
            caveat = partial(
                _caveat,
                moved=moved,
                mixture=mixture,
                busy=file.name in BUSY,
                code=WITHOUT_KERNELS if in_triton else "",
                rollout=OLD_ROLLOUT.in_build(build) if shared else "",
                trainer=OLD_LOGITS.in_build(build) if shared else "",
                sync=OLD_SYNC.in_build(build) if ours else "",
            )
            yield from _phase_records(
                run,
                case,
                file.name,
                predicted,
                lambda phase, fitted_phases=fitted_phases, caveat=caveat: phase in fitted_phases and not caveat(phase),
                caveat,
            )
            if run.get("engine_tokens_per_s"):
                yield Record(
                    "generation",
                    f"{case}, the engine alone",
                    settings["sequences"] * run["response_length"] / run["engine_tokens_per_s"],
                    file.name,
                    lambda r, p=predicted: p(r).schedule.seconds,
                    caveat=caveat("generation"),
                )


_ABOVE = {
    "verl.old_log_prob": "the pass: verl's work, entropy",
    "verl.update": "the passes: verl's work, entropy",
    "verl.sync": "both sides' work: verl's calls between processes, waking the rollout up, CUDA IPC",
}


def fit_verl(put: Callable[..., None], rates: Callable[..., Rates]) -> None:
    """What verl does around a phase, above what is predicted of it in the rows that calibrate: around the trainer's
    phases seconds and seconds a sequence, by least squares; a sync's, and what no phase has, as a mean."""
    of_sequences = tuple(f"{name}.sequence" for name in BY_SEQUENCES)
    of_sync = ("sync.gather", "sync.gpu")  # by fit_gpus, last
    unknown = rates(**dict.fromkeys((*VERLS_PARTS.values(), *of_sequences, "verl.rest", *of_sync), 0.0))
    in_verl = [one for one in step_records([RESULTS / name for name in CALIBRATING]) if one.calibrates]
    rows = " and ".join(CALIBRATING_ROWS)
    for phase, name in VERLS_PARTS.items():
        found = [one for one in in_verl if one.phase == phase]
        above = f"of what {rows} of {', '.join(dict.fromkeys(one.source for one in found))} have above {_ABOVE[name]}"
        known = np.array([one.predict(unknown) for one in found])
        left = np.array([one.measured for one in found]) - known
        if name not in BY_SEQUENCES:
            put(name, statistics.fmean(left), "s", f"mean {above}")
            continue
        a_second_each = unknown.including({f"{name}.sequence": 1.0})
        sequences = np.array([one.predict(a_second_each) for one in found]) - known
        (start, each), *_ = np.linalg.lstsq(np.stack([np.ones(len(left)), sequences], 1), left, rcond=None)
        put(name, start, "s", f"least squares {above}")
        put(f"{name}.sequence", each, "s", f"least squares {above}, by sequences of a GPU")
    rest = statistics.fmean(run["rest_s"] for run in recorded(CALIBRATING[0])["runs"] if run["row"] in CALIBRATING_ROWS)
    put("verl.rest", rest, "s", f"mean of what {rows} of {CALIBRATING[0]} have above all phases")
