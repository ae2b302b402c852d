# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A fault inside a real verl run, at a chosen phase of a chosen step; loaded by verl in each of its processes.

verl imports what ``VERL_USE_EXTERNAL_MODULES`` names, in the driver, in every Ray actor and in vLLM's workers, so this
module needs no hook in the product. ``JETRL_FAULT`` holds a :class:`Fault` as JSON. Modules of verl are changed right
after their import, in the process that imports them, and nothing happens without the variable.

Three processes can be killed: the *driver* (``main_ppo``), the *trainer* (the Ray actor that holds the FSDP engine)
and the *rollout* (vLLM's worker); of several trainers or workers the last rank, since rank 0 is the one that speaks.
Each writes its process id into the fault's folder. verl's own controller, which calls the phases one after another,
fires: it leaves a record and sends SIGKILL, at once or after a delay that puts it into the middle of the phase. A phase
that ends before its delay does not go by: the kill comes at its end, and the record says so. A weight sync is cut by a
rollout worker that has received a bucket and not loaded it, a checkpoint by the trainer, in the middle of a file.
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
PHASES = {"generation": 0.5, "log_prob": 0.1, "update": 0.2, "sync": None, "checkpoint": 0.0}
"""Phase of a step -> seconds after its beginning at which the victim is killed; None: not by the controller.

Short, since 64 sequences of the demo's policy go through a phase in half a second or less on a GPU.
"""
IN_THE_PHASE, AT_ITS_END = "in the phase", "at the phase's end"

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
        """Wall-clock time at which the phase began, of a NaN that it was written; None before it."""
        record = Path(self.folder) / "fired"
        return float(record.read_text().split()[0]) if record.exists() else None

    def killed(self) -> str | None:
        """``IN_THE_PHASE`` or ``AT_ITS_END``, once the victim has been killed."""
        record = Path(self.folder) / "killed"
        return record.read_text().partition(" ")[2] if record.exists() else None

    def _introduce(self, victim: str, rank: int = 0, ranks: int = 1) -> None:
        if rank == ranks - 1:
            (Path(self.folder) / f"{victim}.pid").write_text(identity(os.getpid()))

    def _record(self, name: str, words: str) -> bool:
        """Note time and words; False if that was noted before, by whichever process."""
        try:
            with (Path(self.folder) / name).open("x") as record:
                record.write(f"{time.time()} {words}")
        except FileExistsError:
            return False
        return True

    def strike(self, when: str = IN_THE_PHASE) -> None:
        """Kill the victim, unless it has been killed.

        Raises:
            FileNotFoundError: it has not said who it is, or has ended by itself: nothing is killed, nor said to be.
        """
        if self.killed() is not None:
            return
        victim = (Path(self.folder) / f"{self.victim}.pid").read_text()
        pid = int(victim.split()[0])
        if identity(pid) != victim:
            raise FileNotFoundError(f"process {pid}, the {self.victim}, has ended by itself; another one has its id")
        if self._record("killed", when):
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)  # who goes on must not win the race against a death that comes first

    def fire(self) -> None:
        """The phase begins: kill the victim now, after the phase's delay, or not from here."""
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
    """A process's id with the time of its start, by which another one that has the id later is told apart.

    Raises:
        FileNotFoundError: there is none.
    """
    # Fields behind the command, which may have spaces and brackets: the third to the last but the first two (proc(5)).
    behind = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{pid} {behind[19]}"


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


def _around(
    holder: Any, name: str, before: Callable[[Any], None] | None, after: Callable[[Any], None] | None = None
) -> None:
    """Call ``before(self)`` before each call of a method and ``after(self)`` behind each that returns."""
    stock = getattr(holder, name)

    def method(self, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self)
        result = stock(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    # verl's decorators leave what its controller dispatches by on the function.
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
        _around(module.PPOTrainer, "on_sample_begin", when("generation", fault.fire))
        _around(module.PPOTrainer, "_compute_old_log_prob", *phase("log_prob"))
        _around(module.PPOTrainer, "_update_actor", *phase("update"))
        if (fault.victim, fault.phase) != ("trainer", "checkpoint"):
            _around(module.PPOTrainer, "_save_checkpoint", *phase("checkpoint"))

    def in_trainer_sync(module: Any) -> None:
        _around(module.PPOTrainerSync, "on_sample_end", when("generation", fault.finish))
        _around(module.PPOTrainerSync, "on_step_end", *phase("sync"))

    def in_engine(module: Any) -> None:
        def introduce(engine: Any) -> None:
            fault._introduce("trainer", engine.rank, torch_distributed().get_world_size())

        _around(module.FSDPEngine, "initialize", introduce)

    def in_rollout(module: Any) -> None:
        cut = set()

        def loads(worker: Any) -> None:
            if fault.phase == "sync" and fault.fired() is not None:
                fault.strike()

        def begins(worker: Any) -> None:
            fault._introduce("rollout", worker.rank, worker.parallel_config.world_size)
            # What receives a bucket is overridden by the plugin's extension, whose module may have been on its way into
            # this process before verl, and with it this module, was.
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
            # The last thing of an update, so behind its optimizer steps.
            self._updates = getattr(self, "_updates", 0) + 1
            last = self.rank == torch_distributed().get_world_size() - 1
            if last and self._updates == fault.step and fault._record("fired", str(fault)):
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
            "verl.workers.rollout.vllm_rollout.utils": in_rollout,
        }
    sys.meta_path.insert(0, _AfterImport(actions))
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
    """Let this process die in the middle of the optimizer's file, as if killed while it was writing."""
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
