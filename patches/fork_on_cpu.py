# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine processes fork on the CPU platform (jetrl_verl/cpu_platform.py).

Inside a Ray actor vLLM spawns engine core and worker, and each imports torch, vLLM and verl again: 40 s of
processor time, a third of a launch on two cores. Spawning protects CUDA contexts and executors that call Ray; neither
exists here.
"""

import os

from jetrl_verl.patches.patch import Patch


def _maybe_force_spawn(stock) -> None:
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return stock()
    # Called by vLLM right before it reads the variable; its CPU platform has set "spawn" by then.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


FORK = Patch(
    replaces="vllm.utils.system_utils:_maybe_force_spawn",
    sha256={
        "0.24.0": "ddbca04673593e5408b3cc89ed76e52389991f1afd2c7889abb6a33d58924a5f",
        "0.29.0": "ddbca04673593e5408b3cc89ed76e52389991f1afd2c7889abb6a33d58924a5f",
    },
    by=_maybe_force_spawn,
    symptom="an engine on the CPU takes 40 s of processor time longer to start",
    upstream="spawning inside Ray actors is deliberate; no issue asks for an exception where no accelerator exists",
    until="vLLM forks engine processes where no accelerator exists",
    needed=False,
)
PATCHES = (FORK,)
