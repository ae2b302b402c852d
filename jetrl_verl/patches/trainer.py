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
"""verl's trainer, in the one process that holds it: where the patches of the trainer find what they wrap."""

import sys
from types import ModuleType


def trainer_module() -> ModuleType | None:
    """``verl.trainer.ppo.v1.trainer_base``; None in every other process.

    None also while it is still being imported and has no class yet: a later call finds it.
    """
    trainer = sys.modules.get("verl.trainer.ppo.v1.trainer_base")
    return trainer if hasattr(trainer, "PPOTrainer") else None
