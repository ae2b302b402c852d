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
"""What ``jetrl.operations=auto`` is: ``shared`` where the shared operations cover the whole job, else ``stock``.

Decided once, in the driver, when Hydra composes the config, before Ray and any GPU. The config that travels to the
trainer and to vLLM says ``shared`` or ``stock``: both sides read one word, and the contract check compares what came of
it. One line on stderr says which it is and why.

Only what the implementations cannot do makes it ``stock``. What they can do, but without equal log-probabilities (a
rollout over several GPUs, stale samples), does not: that is refused by ``precision=jet_fp8_exact`` alone.
"""

import sys
from functools import cache

from omegaconf import DictConfig, OmegaConf

from .check import MODEL, ROLLOUT, only_stock, reader
from .environment import no_shared_operations, on_cpu, read_model
from .options import JetConfig, UnsupportedConfiguration
from .vllm_arguments import vllm_arguments


def resolve_operations(config: DictConfig) -> None:
    """Write ``shared`` or ``stock`` in the place of ``jetrl.operations=auto``, and say so; else change nothing.

    Args:
        config: a composed config; one without a ``jetrl`` node passes.
    """
    if OmegaConf.select(config, "jetrl.operations") != "auto":
        return
    reason = _why_stock(config)
    OmegaConf.update(config, "jetrl.operations", "stock" if reason else "shared")
    if reason:
        _say(f"jetrl_verl: jetrl.operations=auto is stock, since {reason}.")
    else:
        _say("jetrl_verl: jetrl.operations=auto is shared, since the shared operations cover the whole job.")


def _why_stock(config: DictConfig) -> str:
    """The first thing that the shared operations do not serve, cheapest questions first; empty if there is none."""
    for setting, _ in only_stock(reader(config)):
        return f"the shared operations do not cover {setting}"
    if on_cpu():
        return "the shared operations are slow on a CPU (exact sums in float64)"
    import torch

    if not torch.cuda.is_available():
        return (
            "this driver sees no GPU and so cannot know the workers'; set jetrl.operations=shared if all of them have "
            "compute capability 9.0"
        )
    return no_shared_operations() or _uncovered_model(config)


def _uncovered_model(config: DictConfig) -> str:
    from jetrl_verl import ops
    from jetrl_verl.layers import SUPPORTED_MODEL_TYPES
    from jetrl_verl.ops.coverage import FIELDS

    get = reader(config)
    path = get(f"{MODEL}.path")
    try:
        model = read_model(path)
        if model is None:
            return f"the configuration of the model {path} cannot be read from here"
        if model.get("model_type") not in SUPPORTED_MODEL_TYPES:
            return f"the shared operations do not cover models of type {model.get('model_type')}"
        ops.check_model(model)
    except (ValueError, UnsupportedConfiguration) as uncovered:
        # Without the remedy, which is for a run that asked for `shared`.
        return str(uncovered).partition("; ")[0]
    trainer = get(f"{MODEL}.override_config") or {}
    rollout = vllm_arguments(JetConfig.from_node(config.jetrl), get(f"{ROLLOUT}.engine_kwargs.vllm"))
    for where, overrides in (
        (f"{MODEL}.override_config", trainer.get("model_config", trainer)),
        (f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides", rollout["hf_overrides"]),
    ):
        for key, value in overrides.items():
            if key in FIELDS and value != model.get(key):
                return f"{where} overrides {key} of the model"
    return ""


@cache
def _say(line: str) -> None:
    """Once per process: Hydra composes a config twice before a run."""
    print(line, file=sys.stderr, flush=True)
