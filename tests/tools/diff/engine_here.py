# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An engine of ``jetrl diff`` in the test's own process, which starts faster than a subprocess."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
from rich.console import Console
from vllm_engine import CACHE

from jetrl_verl import kernels
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.diff import rollout, run
from jetrl_verl.tools.diff.measures import bits
from jetrl_verl.tools.diff.recording import Recording, Request


def run_here(request: Request, responses: list[list[int]] | None = None, **arguments) -> Recording:
    """The recording of ``request``, optionally with other ``responses`` and more engine ``arguments``."""
    from vllm.distributed import cleanup_dist_env_and_memory

    request = replace(request, responses=responses or request.responses)
    request = replace(request, arguments=request.arguments | CACHE | arguments)
    try:
        # A subprocess gets the stance from its environment.
        with mock.patch.dict(os.environ, run.engine_environment(cuda=False)), torch.compiler.set_stance("force_eager"):
            return rollout.run(request)
    finally:
        cleanup_dist_env_and_memory()


def comparer(policy, folder, patch, overrides: tuple[str, ...] = (), **arguments) -> Callable:
    """Callable precision -> (status, report, output, recording): the command on two prompts, with one engine here.

    Args:
        policy: its model. folder: for its files. patch: pytest's. overrides, arguments: of the job and of the engine.
    """
    prompts, answers = folder / "prompts.jsonl", [[5 + i, 7, 9, 4, 8, 6, 5, 10] for i in range(2)]
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": [3 + i] * (9 + 7 * i)}) for i in range(2)))
    recordings = []

    def engine(request, *args):
        if not recordings:
            recordings.append(run_here(request, answers, max_num_seqs=2, enable_prefix_caching=False, **arguments))
        return recordings[0]

    def compare(precision):
        patch.setattr(run, "run_engine", engine)
        options = run.DiffOptions(policy, (precision,), prompts, 2, len(answers[0]), 1.0, folder, overrides)
        console = Console(record=True, width=120)
        status = run.run_diff(options, console)
        (report,) = json.loads((folder / "report.json").read_text())["precisions"]
        return status, report, console.export_text(), recordings[0]

    return compare


def flipped(x: torch.Tensor | QuantizedTensor, row: int, element: int) -> torch.Tensor:
    """A copy with the last bit of one element changed; of quantized data, of the tensor that was quantized."""
    x = x.source if isinstance(x, QuantizedTensor) else x
    x = x.clone(memory_format=torch.contiguous_format)
    rows = bits(x).view(-1, x.shape[-1])
    rows[row, element] ^= 1
    return x


def planted(name: str, calls: int, call: int, row: int, element: int):
    """A patch that flips a bit in (the last) output of one of the ``calls`` of ``kernels.<name>`` in a forward."""
    operation, count = getattr(kernels, name), iter(range(10**6))

    def run(*args):
        output = operation(*args)
        if next(count) % calls != call:
            return output
        if isinstance(output, tuple):
            return *output[:-1], flipped(output[-1], row, element)
        return flipped(output, row, element)

    return mock.patch.object(kernels, name, run)
