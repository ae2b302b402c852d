# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An engine of ``jetrl diff`` in the test's own process, which starts faster than a subprocess."""

import os
from dataclasses import replace
from unittest import mock

import torch
from vllm_engine import CACHE

from jetrl_verl.tools.diff import rollout, run
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
