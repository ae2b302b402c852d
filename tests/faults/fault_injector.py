# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A fault inside a real verl run, at a chosen phase of a chosen step; loaded by verl in each of its processes.

verl imports what ``VERL_USE_EXTERNAL_MODULES`` names, in the driver, in every Ray actor and in vLLM's workers, so this
module needs no hook in the product. ``JETRL_FAULT`` holds a :class:`Fault` as JSON. Modules of verl are changed right
after their import, in the process that imports them, and nothing happens without the variable.

Three processes can be killed: the *driver* (``main_ppo``), the *trainer* (the Ray actor that holds the FSDP engine)
and the *rollout* (vLLM's worker). Each writes its process id into the fault's folder. verl's own controller, which
calls the phases one after another, fires: it leaves a record and sends SIGKILL, at once or after a delay that puts it
into the middle of the phase. A checkpoint is cut by the trainer itself, in the middle of a file.
"""

import dataclasses
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VICTIMS = ("rollout", "trainer", "driver")
PHASES = {"generation": 1.0, "log_prob": 0.3, "update": 1.0, "sync": 0.0, "checkpoint": 0.0}
"""Phase of a step -> seconds after its beginning at which the victim is killed."""

VARIABLE = "JETRL_FAULT"
MODULE = "fault_injector"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens where.

    Attributes:
        kind: ``kill``, or ``nan``: one weight of the trainer becomes NaN after the update.
        victim: one of ``VICTIMS``. phase: one of ``PHASES``. step: global step, from 1.
        folder: where process ids and the record of the firing go.
    """

    kind: str
    victim: str
    phase: str
    step: int
    folder: str

    def environment(self) -> dict[str, str]:
        """Variables that arm a run with this fault."""
        here = str(Path(__file__).parent)
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            VARIABLE: json.dumps(dataclasses.asdict(self)),
            "VERL_USE_EXTERNAL_MODULES": MODULE,
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def fired(self) -> float | None:
        """Wall-clock time of the firing, None before it."""
        record = Path(self.folder) / "fired"
        return float(record.read_text().split()[0]) if record.exists() else None

    def _introduce(self, victim: str) -> None:
        (Path(self.folder) / f"{victim}.pid").write_text(str(os.getpid()))

    def _record(self) -> bool:
        """Note the firing; False if it has fired before."""
        try:
            with (Path(self.folder) / "fired").open("x") as record:
                record.write(f"{time.time()} {self}")
        except FileExistsError:
            return False
        return True

    def _kill(self) -> None:
        os.kill(int((Path(self.folder) / f"{self.victim}.pid").read_text()), signal.SIGKILL)

    def fire(self) -> None:
        """Kill the victim, now or after the phase's delay."""
        if not self._record():
            return
        delay = PHASES[self.phase]
        if delay == 0.0:
            self._kill()
            time.sleep(0.2)  # the controller must not win the race against a death that comes first
        else:
            threading.Timer(delay, self._kill).start()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after its first import."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions

    def find_spec(self, name, path=None, target=None):
        action = self._actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_then_act(module) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_then_act
        return spec


def _before(holder: Any, name: str, action: Callable[[Any], None]) -> None:
    """Call ``action(self)`` before each call of a method."""
    stock = getattr(holder, name)

    def method(self, *args: Any, **kwargs: Any) -> Any:
        action(self)
        return stock(self, *args, **kwargs)

    # verl's decorators leave what its controller dispatches by on the function.
    method.__dict__.update(vars(stock))
    method.__name__ = name
    setattr(holder, name, method)


def _arm(fault: Fault) -> None:
    def phase(name: str) -> Callable[[Any], None]:
        def begins(trainer: Any) -> None:
            if (name, trainer.global_steps) == (fault.phase, fault.step):
                fault.fire()

        return begins

    def in_trainer_base(module: Any) -> None:
        _before(module.PPOTrainer, "on_sample_begin", phase("generation"))
        _before(module.PPOTrainer, "_compute_old_log_prob", phase("log_prob"))
        _before(module.PPOTrainer, "_update_actor", phase("update"))
        if (fault.victim, fault.phase) != ("trainer", "checkpoint"):
            _before(module.PPOTrainer, "_save_checkpoint", phase("checkpoint"))

    def in_trainer_sync(module: Any) -> None:
        _before(module.PPOTrainerSync, "on_step_end", phase("sync"))

    def in_engine(module: Any) -> None:
        _before(module.FSDPEngine, "initialize", lambda engine: fault._introduce("trainer"))

    def in_rollout(module: Any) -> None:
        _before(module.JetWorkerExtension, "update_weights_from_ipc", lambda worker: fault._introduce("rollout"))

    def in_checkpoints(module: Any) -> None:
        if (fault.victim, fault.phase) == ("trainer", "checkpoint"):
            _before(module.FSDPCheckpointManager, "save_checkpoint", lambda manager: _die_while_saving(fault))

    def poison(module: Any) -> None:
        stock = module.FSDPEngine.lr_scheduler_step

        def lr_scheduler_step(self) -> Any:
            # The last thing of an update, so behind its optimizer steps.
            self._updates = getattr(self, "_updates", 0) + 1
            if self._updates == fault.step and fault._record():
                _poison_one_weight(self.module)
            return stock(self)

        module.FSDPEngine.lr_scheduler_step = lr_scheduler_step

    engine = "verl.workers.engine.fsdp.transformer_impl"
    actions = {engine: in_engine}
    if fault.kind == "nan":
        actions[engine] = poison
    else:
        actions |= {
            "verl.trainer.ppo.v1.trainer_base": in_trainer_base,
            "verl.trainer.ppo.v1.trainer_sync": in_trainer_sync,
            "verl.utils.checkpoint.fsdp_checkpoint_manager": in_checkpoints,
            "jetrl_verl.rollout.worker": in_rollout,
        }
    sys.meta_path.insert(0, _AfterImport(actions))
    if "verl.trainer.main_ppo" in Path("/proc/self/cmdline").read_text():
        fault._introduce("driver")


POISONED = "model.layers.1.mlp.up_proj.weight"


def _poison_one_weight(model: Any) -> None:
    import torch

    with torch.no_grad():
        weight = dict(model.named_parameters())[POISONED]
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        local[0, 0] = float("nan")


def _die_while_saving(fault: Fault) -> None:
    """Let this process die in the middle of the optimizer's file, as if killed while it was writing."""
    import torch

    stock = torch.save
    if stock.__module__ == __name__:
        return

    def save(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        stock(content, file, *args, **kwargs)
        if "optim_world_size" in str(file) and f"global_step_{fault.step}/" in str(file) and fault._record():
            os.truncate(file, os.path.getsize(file) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


if VARIABLE in os.environ:
    _arm(Fault(**json.loads(os.environ[VARIABLE])))
