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
"""Entry point ``vllm.general_plugins``: makes ``quantization=jetrl_fp8`` known in every process that vLLM starts.

vLLM calls :func:`register` in the server, the engine core and each worker, possibly more than once per process.
"""

import os
import sys
import traceback


def register() -> None:
    """Register the quantisation methods and the layers that may run shared operations.

    On the opt-in CPU platform also keep BF16 weights reloadable. A failure is announced and not raised: vLLM would end
    with it, and this process may serve a model that has nothing to do with this project. Where the method was asked
    for, vLLM then stops at its unknown name.
    """
    try:
        import jetrl_verl.rollout.int8_method
        import jetrl_verl.rollout.shared_operations  # noqa: F401  registration is the import's effect

        if os.environ.get("VERL_PLATFORM") == "cpu":
            from jetrl_verl.patches import vllm_cpu

            vllm_cpu.install()
    except Exception:
        print("jetrl_verl: the vLLM plugin failed to load, so FP8 rollouts will not work:", file=sys.stderr)
        traceback.print_exc()
