# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""vLLM's CPU build inside a reinforcement-learning loop, on the opt-in CPU platform.

*BF16 linears stay reloadable.* vLLM 0.24.0 packs a CPU linear's weight at load and drops the original
(``remove_weight=True``), so the next weight sync finds a parameter of size 0. Here the layer multiplies with the
parameter itself. Slower by the packing's gain, which a model small enough for CPU reinforcement learning does not
notice. Not an upstream issue: inference never reloads.

*Engine processes fork.* Inside a Ray actor vLLM spawns its engine core and its worker, and each imports torch, vLLM and
verl anew: 40 s of processor time together, a third of the launch on two cores. The reasons for spawning are CUDA
contexts and executors that call Ray; neither exists here.

Both can go when vLLM keeps a CPU linear's weight on request and forks engine processes where no accelerator exists.
"""

import os

import torch


def install() -> None:
    """Apply both; idempotent."""
    from vllm.model_executor.layers import utils
    from vllm.utils import system_utils

    def keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def allow_fork() -> None:
        # Called by vLLM right before it reads the variable; its CPU platform has set "spawn" by then.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    utils.dispatch_cpu_unquantized_gemm = keep_weight
    system_utils._maybe_force_spawn = allow_fork
