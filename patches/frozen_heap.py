# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector leaves out what verl's driver and workers have built before the first step.

Each holds 0.6 to 0.8 million objects, most of them of imported modules. A full collection visits all of them in half a
second, in the middle of a step, and the GPUs wait. vLLM freezes the heaps of its own processes in the same way.
"""

import gc
from typing import Any

from jetrl_verl.patches.patch import Patch

_BETWEEN_FULL = 40
"""Collections of the younger generations between two full ones: as many as in a worker whose heap is not frozen."""


def freeze_after(stock, self: Any) -> None:
    stock(self)
    # A frozen object is never found to be garbage: neither what is garbage now, nor a model that was built before.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    # Python collects the more often the fewer objects it would visit.
    gc.set_threshold(*gc.get_threshold()[:2], _BETWEEN_FULL)


_WHY = dict(
    symptom="a full collection of Python's garbage visits half a million objects that stay, while the GPUs wait",
    upstream="no issue is known",
    until="verl freezes the heap at the end of its start",
    needed=False,
)

DRIVER = Patch(
    replaces="verl.trainer.ppo.v1.trainer_base:PPOTrainer.init",
    sha256={"0.9.1": "215e176abc4cec52b0f11b1995d13136880b8e1a232e4e485faa267837c5ad92"},
    by=freeze_after,
    **_WHY,
)
ENGINE = Patch(
    replaces="verl.workers.engine.fsdp.transformer_impl:FSDPEngine.initialize",
    sha256={"0.9.1": "4bcde40d11b58346eafca067bd543717ed18ba88156d377145df2cc0821a9637"},
    by=freeze_after,
    **_WHY,
)
PATCHES = (DRIVER, ENGINE)
