# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The command: from options, from overrides of verl or from a recipe's script to a report."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from jetrl_verl.config.environment import cache_message
from jetrl_verl.formats.catalog import QUANTIZED_CACHES
from jetrl_verl.tools.advise import AdviseError
from jetrl_verl.tools.advise.gpus import MEASURED
from jetrl_verl.tools.advise.job import Job, Means, compose, job_of_config, job_of_options, words_of_script
from jetrl_verl.tools.advise.predict import STOCK_VERL, precisions, predict, with_each_cache
from jetrl_verl.tools.advise.rates import measured
from jetrl_verl.tools.advise.report import as_json, render
from jetrl_verl.tools.advise.settings import REFUSED, STOCK, Finding, findings, model_findings


@dataclass(frozen=True)
class AdviseOptions:
    """What is asked.

    Attributes:
        words: overrides of verl, or arguments of ``script``. script: a recipe's.
        model: folder or known name; beside ``words`` or ``script`` it stands for ``model.path``.
        gpus, prompt_length, response_length, batch, samples, tp: sizes, where neither words nor script are given.
        means: mean lengths. as_json: print JSON. gpu: of ``GPUS``.
    """

    words: tuple[str, ...] = ()
    script: Path | None = None
    model: str | None = None
    gpus: int = 8
    prompt_length: int = 1024
    response_length: int = 8192
    batch: int = 256
    samples: int = 8
    tp: int = 1
    means: Means = Means()
    as_json: bool = False
    gpu: str = MEASURED


def job_and_settings(options: AdviseOptions) -> tuple[Job, list[Finding] | None]:
    """The job, and what its settings cost; None where none were given."""
    words = list(options.words)
    if options.script is not None:
        words = words_of_script(options.script, words)
    if words:
        from jetrl_verl.config.check import reader

        config = compose(words, "jet_fp8")
        job = job_of_config(reader(config), options.means, options.model, options.gpu)
        return job, findings(config, job.model, job.tp)
    if options.model is None:
        raise AdviseError(
            "nothing was asked; pass verl's overrides after `--`, --script FILE, or --model with lengths and GPUs."
        )
    job = job_of_options(
        options.model,
        options.gpus,
        options.prompt_length,
        options.response_length,
        options.batch,
        options.samples,
        options.means,
        tp=options.tp,
        gpu=options.gpu,
    )
    return job, model_findings(job.model, job.tp) or None


def run_advise(options: AdviseOptions, console: Console) -> int:
    """Predict and print; 0.

    Raises:
        AdviseError: nothing can be predicted.
    """
    job, settings = job_and_settings(options)
    rates = measured()
    job = replace(job, notes=(*job.notes, *rates.notes_on(job.gpu)))
    effects = {finding.effect for finding in settings or ()}
    columns = precisions(job, shared=STOCK not in effects)
    if REFUSED in effects:
        columns = tuple(column for column in columns if column.name in STOCK_VERL)
    predictions = [predict(rates, job, column) for column in columns]
    # Where jet_fp8 may have either cache.
    flow = [column for column in columns if column.name == "jet_fp8" and column.engine.shared]
    without = any(cache_message(job.model.config, "", held) for held in QUANTIZED_CACHES)
    caches = with_each_cache(rates, job, flow[0]) if flow and not without else {}
    if options.as_json:
        print(json.dumps(as_json(job, rates, predictions, settings, caches), indent=1))
    else:
        render(job, rates, predictions, settings, caches, console)
    return 0
