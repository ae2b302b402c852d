# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The command ``jetrl diff``: for each precision two vLLM engines, then the trainer, then the report.

The first engine is configured as a run's, by verl's composed configuration. The second runs eagerly, one sequence at a
time, repeats the same responses and is recorded. Their difference is what compiler, CUDA graphs and batching change.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jetrl_verl.algorithms.old_log_probs import Difference
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.inputs import UserError, reading, writing
from jetrl_verl.tools.diff.prompts import Prompts, read_prompts
from jetrl_verl.tools.diff.recording import Recording, Request
from jetrl_verl.tools.launch import compose, precision_word, quote
from jetrl_verl.tools.provenance import provenance


@dataclass(frozen=True)
class DiffOptions:
    """What to compare. Raises ``UserError`` for a wrong precision.

    Attributes:
        model: Hugging Face folder. prompts: file, None for the built-in ones. limit: number of prompts.
        response: most tokens to sample for each. temperature: above 0. out: folder of the report.
        overrides: Hydra overrides of verl's configuration, for example ``jetrl.scale_rule=pow2``.
        sequence: file of a stopped run, whose sequence, temperature and options are used instead of the above.
    """

    model: Path
    precisions: tuple[str, ...]
    prompts: Path | None
    limit: int
    response: int
    temperature: float
    out: Path
    overrides: tuple[str, ...] = ()
    sequence: Path | None = None

    def __post_init__(self) -> None:
        for precision in self.precisions:
            if precision not in PRECISIONS:
                raise UserError(f"precision={precision} is not a precision; use one of {', '.join(PRECISIONS)}.")
        if not self.precisions:
            raise UserError("no precision was named; use --precision jet_fp8_exact.")
        if word := precision_word(self.overrides):
            raise UserError(f"{word} would leave the report named after another precision; choose it with --precision.")


@dataclass(frozen=True)
class EngineSettings:
    """The job of a precision (None for bf16) and arguments of ``vllm.LLM`` as a run sets them."""

    job: Job | None
    arguments: dict[str, Any]

    def request(self, model: Path, prompts: Prompts, response: int, temperature: float, **arguments: Any) -> Request:
        """To an engine with these and further ``arguments``, which samples."""
        node, tokens = (
            None if self.job is None else self.job.as_dict(),
            (prompts.vocabulary, prompts.banned, prompts.ids),
        )
        return Request(str(model), node, self.arguments | arguments, *tokens, response, temperature, prompts.stop)


def compose_engine(model: Path, precision: str, overrides: Sequence[str] = ()) -> EngineSettings:
    """The engine that a run with ``precision`` would start for the model in folder ``model``, on one GPU.

    Raises:
        UserError: verl's configuration does not compose, or the precision does not support the model.
    """
    from omegaconf import OmegaConf

    from jetrl_verl.config.model import check_model, read_model
    from jetrl_verl.config.support.table import refusal
    from jetrl_verl.models import family, model_types
    from jetrl_verl.rollout.arguments import vllm_arguments

    words = [
        f"precision={precision}",
        f"actor_rollout_ref.model.path={quote(model.absolute())}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ]
    config = compose([*words, *overrides])
    rollout = config.actor_rollout_ref.rollout
    user = OmegaConf.to_container(rollout.engine_kwargs.get("vllm") or OmegaConf.create(), resolve=True)
    job = None if config.get("jetrl") is None else Job.of(OmegaConf.to_container(config.jetrl))
    files = read_model(str(model.absolute()))
    if job is not None:
        user = vllm_arguments(job, user)
        check_model(job, files)
    known = files.config.get("model_type") in model_types()
    if known and family(files.config).delta_net is not None and not (job is not None and job.shared):
        raise UserError(refusal("hybrid_of_diff", what=f"precision={precision} with the model {model}"))
    if rollout.tensor_model_parallel_size != 1:
        raise UserError("jetrl diff runs the rollout on one GPU; leave tensor_model_parallel_size alone.")
    graphs = user.pop("compilation_config", None) or {}
    with reading(f"compilation_config={graphs}", "setting of vLLM", "Set a mapping"):
        graphs = json.loads(graphs) if isinstance(graphs, str) else dict(graphs)
    if rollout.cudagraph_capture_sizes:
        graphs["cudagraph_capture_sizes"] = list(rollout.cudagraph_capture_sizes)
    names = ("dtype", "enforce_eager", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill")
    names += ("enable_prefix_caching", "logprobs_mode", "gpu_memory_utilization", "seed", "max_model_len")
    arguments = {name: rollout[name] for name in names}
    arguments["load_format"] = "auto" if job is None else "dummy"
    arguments["compilation_config"] = {"cudagraph_mode": "FULL_AND_PIECEWISE"} | graphs  # as verl's server sets it
    return EngineSettings(job, arguments | {name: value for name, value in user.items() if value is not None})


def engine_environment(cuda: bool) -> dict[str, str]:
    """Environment of a process that runs an engine of ``jetrl diff``."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # verl's worker extension reads it.
        "VERL_RAY_JOB_ID": f"jetrl-diff-{os.getpid()}",
    }
    if not cuda:
        environment |= {"VERL_PLATFORM": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # Both engines are eager on a CPU, where only the sampler would compile, for ranks that nobody reads.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return environment


def run_engine(request: Request, folder: Path, name: str, cuda: bool) -> Recording:
    """The recording of ``request``, from a process of its own that logs to ``folder/<name>.log``.

    Raises:
        UserError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="jetrl-diff-") as scratch:
        file, log = Path(scratch) / "request.json", folder / f"{name}.log"
        request = replace(request, out=str(Path(scratch) / "recording.pt"))
        file.write_text(json.dumps(asdict(request)))
        command = [sys.executable, "-m", "jetrl_verl.tools.diff.rollout", str(file)]
        with log.open("w") as output:
            status = subprocess.run(command, env=engine_environment(cuda), stdout=output, stderr=output).returncode
        if status:
            reason = Path(request.out).with_suffix(".error")
            if reason.is_file():
                raise UserError(reason.read_text())
            raise UserError(f"the rollout engine ended with status {status}; its log is {log}.")
        return Recording.load(request.out)


def _one(
    options: DiffOptions, precision: str, prompts: Prompts, stopped: Difference | None, folder: Path, console: Console
) -> dict[str, Any]:
    """Compare one precision and write ``report.json`` to ``folder``; a stopped run is the rollout as configured."""
    import torch

    from jetrl_verl.config.workers import answer_here, gpu_complaint
    from jetrl_verl.tools.diff.attribution import attribute
    from jetrl_verl.tools.diff.report import render, summarize
    from jetrl_verl.tools.diff.trainer import Trainer

    cuda = torch.cuda.is_available()
    settings = compose_engine(options.model, precision, options.overrides)
    if settings.job is not None and (why := gpu_complaint(answer_here(), {"GPU": int(cuda)}, settings.job)):
        raise UserError(f"{why}.")
    arguments = settings.arguments
    needed = max(map(len, prompts.ids)) + (options.response if stopped is None else len(stopped.response))
    arguments["max_model_len"] = arguments["max_model_len"] or needed
    if needed > min(arguments["max_model_len"], prompts.positions):
        raise UserError(
            f"the longest prompt and --response {options.response} need {needed} positions and the model has "
            f"{min(arguments['max_model_len'], prompts.positions)}; use shorter prompts or a smaller --response."
        )
    arguments["enforce_eager"] = arguments["enforce_eager"] or not cuda
    request = settings.request(options.model, prompts, options.response, options.temperature)
    if stopped is None:
        with console.status(f"{precision}: the rollout as configured"):
            configured = run_engine(request, folder, "configured", cuda)
    else:
        configured = Recording(prompts.ids, [stopped.response], torch.tensor(stopped.rollout))
    recorded = replace(
        request,
        responses=configured.responses,
        # A cached prefix is not computed, hence not recorded.
        arguments=arguments | {"enforce_eager": True, "max_num_seqs": 1, "enable_prefix_caching": False},
    )
    with console.status(f"{precision}: the rollout recorded"):
        recording = run_engine(recorded, folder, "recorded", cuda)
    if stopped is not None:  # the run's rollout reports nothing for tokens that it did not sample
        sampled = torch.tensor(stopped.sampled).bool()
        configured.log_probs = torch.where(sampled, configured.log_probs, recording.log_probs)
    with console.status(f"{precision}: the trainer"):
        device = torch.device("cuda" if cuda else "cpu")
        trainer = Trainer(options.model, settings.job, prompts, options.temperature, device)
        attribution = attribute(trainer, recording)
        del trainer
        if cuda:
            torch.cuda.empty_cache()
    summary = summarize(precision, settings.job, configured, recording, attribution)
    (folder / "report.json").write_text(json.dumps({"build": provenance(), **summary}, indent=1))
    render(summary, console)
    if stopped is not None:
        token = stopped.token
        here = (recording.log_probs[token], attribution.log_probs[token])
        console.print(
            f"step {stopped.step}: {stopped}; here it is {here[0]:.9g} in the recorded rollout and {here[1]:.9g} in "
            "the trainer",
            highlight=False,
            soft_wrap=True,
        )
    return summary


def _stopped(options: DiffOptions) -> tuple[DiffOptions, Difference]:
    """``options`` of the run that has saved ``options.sequence``, and that sequence."""
    with reading(options.sequence, "sequence of a stopped run", "Name the sequence.json that it printed"):
        stopped = Difference.load(options.sequence)
    words = tuple(f"jetrl.{name}={value}" for name, value in stopped.options.items())
    return replace(options, temperature=stopped.temperature, overrides=(*words, *options.overrides)), stopped


def run_diff(options: DiffOptions, console: Console) -> int:
    """Compare every precision; 0 if all log-probabilities are equal in all 32 bits, else 1.

    Raises:
        UserError: a comparison is not possible.
    """
    stopped = None
    if options.sequence is not None:
        options, stopped = _stopped(options)
    prompts = read_prompts(options.model, options.prompts, options.limit)
    if stopped is not None:
        prompts = replace(prompts, ids=[stopped.prompt])
    for name in options.precisions:
        with writing(options.out, "--out"):
            (options.out / name).mkdir(parents=True, exist_ok=True)
    summaries = [_one(options, name, prompts, stopped, options.out / name, console) for name in options.precisions]
    facts = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    report = {"build": provenance(), "options": facts, "precisions": summaries}
    (options.out / "report.json").write_text(json.dumps(report, indent=1))
    console.print(f"layer by layer: {options.out / 'report.json'}", highlight=False, soft_wrap=True)
    return int(not all(summary["equal"] for summary in summaries))
