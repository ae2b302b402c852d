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


def register() -> None:
    """Register the quantisation method; on the opt-in CPU platform also keep BF16 weights reloadable."""
    import jetrl_verl.rollout.method  # noqa: F401  registration is the import's effect

    if os.environ.get("VERL_PLATFORM") == "cpu":
        from jetrl_verl.patches import vllm_cpu

        vllm_cpu.install()
