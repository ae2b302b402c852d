# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A fault inside a real verl run, at a chosen phase of a chosen step, from ``JETRL_FAULT``: a :class:`Fault` as JSON.

verl loads this module in each of its processes (``VERL_USE_EXTERNAL_MODULES``); it changes verl's modules on import.

Killed is the *driver* (``main_ppo``), the *trainer* (the Ray actor of the FSDP engine), the *rollout* (vLLM's worker),
its *engine* (vLLM's core) or its *server* (the Ray actor of it), of several ranks the last.
Each writes its process id into the fault's folder. verl's controller sends SIGKILL after a delay that lies within the
phase, or at the end of a shorter phase. In a weight sync a rollout worker sends it after it has received a bucket, in a
checkpoint the trainer in the middle of a file.
"""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jetrl_verl.patches.after_import import when_imported

VICTIMS = ("rollout", "engine", "server", "trainer", "driver")
PHASES = {"generation": 0.5, "log_prob": 0.1, "update": 0.2, "sync": None, "checkpoint": 0.0}
"""Phase of a step -> seconds after its beginning at which the victim is killed; None: not by the controller.

Short, since 64 sequences of the demo's policy go through a phase in half a second or less on a GPU.
"""
IN_THE_PHASE, AT_ITS_END = "in the phase", "at the phase's end"

RAISED = "injected: no parameter of this name"

VARIABLE = "JETRL_FAULT"
MODULE = "fault_injector"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens where.

    Attributes:
        kind: ``kill``; ``raise``: the rollout raises in a sync; ``refuse``: it refuses its model as it starts; ``nan``:
            one weight of the trainer becomes NaN after the update.
        victim: one of ``VICTIMS``. phase: one of ``PHASES``. step: global step; 0 is the sync before the first one.
        folder: for process ids and records of what happened.
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
        """Wall-clock time at which the phase began or the NaN was written; None before that."""
        record = Path(self.folder) / "fired"
        return float(record.read_text().split()[0]) if record.exists() else None

    def killed(self) -> str | None:
        """``IN_THE_PHASE`` or ``AT_ITS_END``, once the victim has been killed."""
        record = Path(self.folder) / "killed"
        return record.read_text().partition(" ")[2] if record.exists() else None

    def _introduce(self, victim: str, rank: int = 0, ranks: int = 1, process: int = 0) -> None:
        if rank == ranks - 1:
            (Path(self.folder) / f"{victim}.pid").write_text(identity(process or os.getpid()))

    def _record(self, name: str, words: str) -> bool:
        """Record time and words; False if some process has done so before."""
        try:
            with (Path(self.folder) / name).open("x") as record:
                record.write(f"{time.time()} {words}")
        except FileExistsError:
            return False
        return True

    def strike(self, when: str = IN_THE_PHASE) -> None:
        """Kill the victim, unless it has been killed.

        Raises:
            FileNotFoundError: it has not registered, or has ended: nothing is killed or recorded.
        """
        if self.killed() is not None:
            return
        victim = (Path(self.folder) / f"{self.victim}.pid").read_text()
        pid = int(victim.split()[0])
        if identity(pid) != victim:
            raise FileNotFoundError(f"process {pid}, the {self.victim}, has ended; another process has its id")
        if self._record("killed", when):
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)  # no other process may go on before the kill has arrived

    def fire(self) -> None:
        """The phase begins: kill the victim now or after the phase's delay, unless another process does."""
        delay = PHASES[self.phase]
        if not self._record("fired", str(self)) or delay is None:
            return
        if delay == 0.0:
            self.strike()
        else:
            threading.Timer(delay, self.strike).start()

    def finish(self) -> None:
        """The phase has ended."""
        if self.fired() is not None:
            self.strike(AT_ITS_END)


def identity(pid: int) -> str:
    """A process's id and start time, since ids are reused. Raises ``FileNotFoundError`` if there is no such process."""
    return f"{pid} {_fields(pid)[19]}"


def _fields(pid: int) -> list[str]:
    """Of proc(5) from the third, the state, on: after the command, which may have spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _around(
    holder: Any, name: str, before: Callable[[Any], None] | None, after: Callable[[Any], None] | None = None
) -> None:
    """Call ``before(self)`` before each call of a method and ``after(self)`` after it returns."""
    stock = getattr(holder, name)

    def method(self, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self)
        result = stock(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    # verl's controller dispatches by attributes that its decorators set on the function.
    method.__dict__.update(vars(stock))
    method.__name__ = name
    setattr(holder, name, method)


def _arm(fault: Fault) -> None:
    def when(name: str, act: Callable[[], None]) -> Callable[[Any], None]:
        def reached(trainer: Any) -> None:
            if (name, trainer.global_steps) == (fault.phase, fault.step):
                act()

        return reached

    def phase(name: str) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
        return when(name, fault.fire), when(name, fault.finish)

    def in_trainer_base(module: Any) -> None:
        _around(module.PPOTrainer, "_compute_old_log_prob", *phase("log_prob"))
        _around(module.PPOTrainer, "_update_actor", *phase("update"))
        if (fault.victim, fault.phase) != ("trainer", "checkpoint"):
            _around(module.PPOTrainer, "_save_checkpoint", *phase("checkpoint"))

    def in_trainer(name: str) -> Callable[[Any], None]:
        def act(module: Any) -> None:
            _around(getattr(module, name), "on_sample_begin", when("generation", fault.fire))
            _around(getattr(module, name), "on_sample_end", when("generation", fault.finish))
            _around(getattr(module, name), "on_step_end", *phase("sync"))

        return act

    def in_engine(module: Any) -> None:
        def introduce(engine: Any) -> None:
            fault._introduce("trainer", engine.rank, torch_distributed().get_world_size())

        _around(module.FSDPEngine, "initialize", introduce)

    def in_rollout(module: Any) -> None:
        cut = set()

        def loads(worker: Any) -> None:
            if fault.phase == "sync" and (fault.fired() is not None or fault.step == 0):
                fault._record("fired", str(fault))
                if fault.kind == "raise":
                    raise ValueError(RAISED)
                fault.strike()

        def begins(worker: Any) -> None:
            fault._introduce("rollout", worker.rank, worker.parallel_config.world_size)
            fault._introduce("engine", process=os.getppid())
            fault._introduce("server", process=int(_fields(os.getppid())[1]))
            # The plugin's extension overrides the method that receives a bucket, and may be imported before verl.
            if type(worker) not in cut:
                cut.add(type(worker))
                _around(type(worker), "_update_weights", loads)

        _around(module.vLLMColocateWorkerExtension, "update_weights_from_ipc", begins)

    def in_checkpoints(module: Any) -> None:
        if (fault.victim, fault.phase) == ("trainer", "checkpoint"):
            _around(module.FSDPCheckpointManager, "save_checkpoint", lambda manager: _die_while_saving(fault))

    def poison(module: Any) -> None:
        stock = module.FSDPEngine.lr_scheduler_step

        def lr_scheduler_step(self) -> Any:
            # The last call of an update, after its optimizer steps.
            self._updates = getattr(self, "_updates", 0) + 1
            last = self.rank == torch_distributed().get_world_size() - 1
            if last and self._updates == fault.step and fault._record("fired", str(fault)):
                _poison_one_weight(self.module)
            return stock(self)

        module.FSDPEngine.lr_scheduler_step = lr_scheduler_step

    def refusing(module: Any) -> None:
        from jetrl_verl.config.support.table import refuse

        def share_operations(*args: Any) -> None:
            fault._record("fired", str(fault))
            refuse("operation_replaced_in_vllm")

        module.share_operations = share_operations

    engine = "verl.workers.engine.fsdp.transformer_impl"
    actions = {engine: in_engine}
    if fault.kind == "nan":
        actions[engine] = poison
    elif fault.kind == "refuse":
        actions = {"jetrl_verl.rollout.shared_operations": refusing}
    else:
        actions |= {
            "verl.trainer.ppo.v1.trainer_base": in_trainer_base,
            "verl.trainer.ppo.v1.trainer_sync": in_trainer("PPOTrainerSync"),
            "verl.trainer.ppo.v1.trainer_separate_async": in_trainer("PPOTrainerSeparateAsync"),
            "verl.utils.checkpoint.fsdp_checkpoint_manager": in_checkpoints,
            "verl.workers.rollout.vllm_rollout.utils": in_rollout,
        }
    for name, act in actions.items():
        when_imported(name, "tests: a fault", lambda name=name, act=act: act(sys.modules[name]))
    if "verl.trainer.main_ppo" in Path("/proc/self/cmdline").read_text():
        fault._introduce("driver")


def torch_distributed() -> Any:
    import torch.distributed

    return torch.distributed


POISONED = "model.layers.1.mlp.up_proj.weight"


def _poison_one_weight(model: Any) -> None:
    import torch

    with torch.no_grad():
        weight = dict(model.named_parameters())[POISONED]
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        local[0, 0] = float("nan")


def _die_while_saving(fault: Fault) -> None:
    """Kill this process when it has written half of the optimizer's file."""
    import torch

    stock = torch.save
    if stock.__module__ == __name__:
        return

    def save(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        stock(content, file, *args, **kwargs)
        ranks = torch.distributed.get_world_size()
        written = f"global_step_{fault.step}/actor/optim_world_size_{ranks}_rank_{ranks - 1}.pt"
        if str(file).endswith(written) and fault._record("fired", str(fault)):
            os.truncate(file, os.path.getsize(file) // 2)
            fault.strike()

    torch.save = save


if VARIABLE in os.environ:
    _arm(Fault(**json.loads(os.environ[VARIABLE])))
