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
"""The three vLLM engine arguments by which a rollout runs our linears, merged into the user's
``engine_kwargs.vllm``.
"""

import json
from collections.abc import Mapping
from typing import Any

from .options import JetConfig, UnsupportedConfiguration

QUANT_METHOD = "jetrl_fp8"
"""Name under which the rollout's quantisation method is registered in vLLM."""

INT8_METHOD = "jetrl_int8"
"""The same for the INT8 rollout."""

WORKER_EXTENSION = "jetrl_verl.rollout.worker.JetWorkerExtension"
"""vLLM worker extension that receives the trainer's codes; a subclass of verl's own."""


def vllm_arguments(options: JetConfig, user: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's ``engine_kwargs.vllm`` with ``quantization``, ``hf_overrides`` and ``worker_extension_cls`` filled in.

    A value that is already ours is kept, so building a config from a built one changes nothing. Raises
    ``UnsupportedConfiguration`` where one of the three says something else.
    """
    arguments = dict(user or {})
    overrides = arguments.get("hf_overrides") or {}
    if isinstance(overrides, str):
        try:
            overrides = json.loads(overrides)
        except ValueError:
            overrides = None
    if not isinstance(overrides, Mapping):
        raise UnsupportedConfiguration(
            "rollout.engine_kwargs.vllm.hf_overrides is not a mapping; write it as {key: value}."
        )
    arguments["hf_overrides"] = dict(overrides)

    def fill(holder: dict[str, Any], name: str, where: str, value: Any) -> None:
        if holder.get(name) is None:
            holder[name] = value
        elif holder[name] != value:
            raise UnsupportedConfiguration(
                f"rollout.engine_kwargs.vllm.{where} is set against precision={options.precision}, which sets it "
                "itself; remove it, or use precision=bf16."
            )

    method = INT8_METHOD if options.rollout == "int8" else QUANT_METHOD
    fill(arguments, "quantization", "quantization", method)
    fill(arguments, "worker_extension_cls", "worker_extension_cls", WORKER_EXTENSION)
    fill(
        arguments["hf_overrides"],
        "quantization_config",
        "hf_overrides.quantization_config",
        {
            "quant_method": method,
            "scale_rule": options.scale_rule,
            "unfit_layers": options.unfit_layers,
            "contract_check": options.contract_check,
            "operations": options.operations,
            # The layers outside the contract: BF16 on both sides.
            "modules_to_not_convert": ["lm_head"],
        },
    )
    return arguments
