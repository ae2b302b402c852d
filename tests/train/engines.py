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
"""verl's engine as its workers ask for it: from the registry, with a precision's engine config."""

from typing import Any

from jetrl_verl.config.options import JetConfig


def build(
    folder: str, role: str = "actor", *, tokenizer: bool = False, optimizer: dict[str, Any] | None = None, **options
):
    """Engine on the model in ``folder`` under FSDP2, initialised; to be called on each of the processes.

    Args:
        role: as in ``JetFSDPEngineConfig``; ``"critic"`` is a value model.
        tokenizer: whether the folder's tokenizer is loaded.
        optimizer: further fields of ``FSDPOptimizerConfig``.
        options: fields of ``JetConfig`` that differ from ``precision=jet_fp8``.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from jetrl_verl.config.verl_configs import JetFSDPEngineConfig

    kind = "value_model" if role == "critic" else "language_model"
    fields = {"precision": "jet_fp8", "train": "fp8", "rollout": "fp8"} | options
    schedule = {"lr": 1e-3, "lr_warmup_steps": 0, "total_training_steps": 10} | (optimizer or {})
    engine = EngineRegistry.new(
        model_type=kind,
        backend="fsdp2",
        model_config=HFModelConfig(
            path=folder,
            model_type=kind,
            load_tokenizer=tokenizer,
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=JetFSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, jetrl=JetConfig(**fields), jetrl_role=role
        ),
        optimizer_config=FSDPOptimizerConfig(**schedule),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine
