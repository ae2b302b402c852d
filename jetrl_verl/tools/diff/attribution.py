# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compare a trainer with a recorded rollout, operation by operation, and attribute their mismatch to kinds.

Operation k computes ``y = op_k(x)`` from outputs of earlier operations: the rollout ``y_R = op_R(x_R)``, the trainer
``y_T = op_T(x_T)``. The local difference of an operation, without those of earlier ones, is

    e_k = y_R - op_T(x_R)

A forward of the trainer in which every output is replaced by the rollout's measures all of them. *Correcting* a kind
replaces the outputs of its operations by ``y_T + e_k``, in float64, rounded to the type of ``y_T``; where ``y_T`` is
``op_T(x_R)``, by ``y_R``. With all kinds corrected every operation gives ``y_R``, by induction, and log-probabilities
equal the rollout's in every bit. This is checked: an operation that was missed or does not repeat itself is an error.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from jetrl_verl.inputs import UserError
from jetrl_verl.tools.diff.measures import Mismatch, Spread, bits, ulps
from jetrl_verl.tools.diff.operations import KINDS, Operation
from jetrl_verl.tools.diff.recording import Recording
from jetrl_verl.tools.diff.trainer import Trainer


@dataclass(frozen=True)
class FirstDifference:
    """The earliest differing element: by operation, then request, then position."""

    operation: str
    layer: int | None
    kind: str
    request: int
    position: int
    element: int
    rollout: float
    trainer: float
    dtype: str
    ulps: int


@dataclass
class Attribution:
    """The result of :func:`attribute`.

    Attributes:
        log_probs: of the trainer, ``[response tokens]`` FP32. mismatch: of these and the recorded rollout's.
        first: None if nothing differs.
        accumulated: y_T and y_R of each operation, in order. local: op_T(x_R) and y_R.
        without: mismatch with this kind corrected. alone: with all other kinds corrected. Both have the kinds with a
            local difference.
        all_corrected: zero, or :func:`attribute` raises.
    """

    log_probs: torch.Tensor
    mismatch: Mismatch
    first: FirstDifference | None
    accumulated: dict[Operation, Spread]
    local: dict[Operation, Spread]
    all_corrected: Mismatch
    without: dict[str, Mismatch] = field(default_factory=dict)
    alone: dict[str, Mismatch] = field(default_factory=dict)


def attribute(trainer: Trainer, recording: Recording) -> Attribution:
    """Compare ``trainer`` with a recorded rollout.

    Raises:
        UserError: the two sides have other operations, or one of the trainer's does not repeat itself.
    """
    if set(trainer.operations) != set(recording.outputs):
        (operation, *_) = set(trainer.operations) ^ set(recording.outputs)
        raise UserError(f"{operation} runs on one side only; use a decoder of a supported type.")
    forwards = _Forwards(trainer, recording)
    log_probs, accumulated, first = forwards.plain()
    mismatch = Mismatch.of(log_probs, recording.log_probs)
    local = forwards.replaced()
    kinds = [kind for kind in KINDS if any(o.kind == kind and spread.differing for o, spread in local.items())]
    attribution = Attribution(log_probs, mismatch, first, accumulated, local, forwards.corrected(kinds, check=True))
    for kind in kinds:
        attribution.without[kind] = forwards.corrected([kind])
        attribution.alone[kind] = forwards.corrected(other for other in kinds if other != kind)
    return attribution


class _Forwards:
    """The trainer's forwards over one recording."""

    def __init__(self, trainer: Trainer, recording: Recording) -> None:
        self._trainer, self._recording = trainer, recording
        # op_T(x_R) of operations where it is not y_R; correcting changes nothing in others.
        self._local: dict[Operation, torch.Tensor] = {}

    def _rollout(self, operation: Operation, trained: torch.Tensor) -> torch.Tensor:
        """The rollout's output, on the trainer's device."""
        recorded = self._recording.outputs[operation]
        if recorded.dtype != trained.dtype or recorded.shape != trained.shape:
            raise UserError(
                f"{operation} gives {list(recorded.shape)} of {recorded.dtype} in the rollout and "
                f"{list(trained.shape)} of {trained.dtype} in the trainer, which cannot be compared; use "
                "dtype=bfloat16 on both sides."
            )
        return recorded.to(trained.device)

    def plain(self) -> tuple[torch.Tensor, dict[Operation, Spread], FirstDifference | None]:
        """Log-probabilities without a change, the accumulated differences and the first one."""
        accumulated: dict[Operation, Spread] = {}
        first = None

        def compare(operation: Operation, trained: torch.Tensor) -> torch.Tensor:
            nonlocal first
            recorded = self._rollout(operation, trained)
            accumulated[operation] = Spread.of(recorded, trained)
            if accumulated[operation].differing and first is None:
                first = self._first_difference(operation, recorded, trained)
            return trained

        return self._trainer.log_probs(self._recording, compare), accumulated, first

    def _first_difference(self, operation: Operation, recorded: torch.Tensor, trained: torch.Tensor) -> FirstDifference:
        row, element = (bits(recorded) != bits(trained)).nonzero()[0].tolist()
        token = int(self._recording.drawing[row]) if operation.kind in ("lm_head", "sampler") else row
        request, position = self._recording.place(token)
        a, b = recorded[row, element], trained[row, element]
        dtype, distance = str(a.dtype).removeprefix("torch."), int(ulps(a[None], b[None]))
        where = (operation.name, operation.layer, operation.kind, request, position, element)
        return FirstDifference(*where, a.item(), b.item(), dtype, distance)

    def replaced(self) -> dict[Operation, Spread]:
        """Local difference of every operation, each on the rollout's inputs."""
        local: dict[Operation, Spread] = {}

        def replace(operation: Operation, trained: torch.Tensor) -> torch.Tensor:
            recorded = self._rollout(operation, trained)
            local[operation] = Spread.of(recorded, trained)
            if not local[operation].differing:
                return trained  # the same object, which may carry qdata that the next linear layers read
            self._local[operation] = trained.clone().cpu()  # the model may write into its own tensor next
            return recorded

        self._trainer.log_probs(self._recording, replace)
        return local

    def corrected(self, kinds: Iterable[str], check: bool = False) -> Mismatch:
        """Mismatch with the operations of ``kinds`` corrected.

        With ``check`` every operation must give the rollout's output, or ``UserError`` is raised.
        """
        kinds = set(kinds)

        def correct(operation: Operation, trained: torch.Tensor) -> torch.Tensor:
            answer = self._correct(operation, trained) if operation.kind in kinds else trained
            if check and not torch.equal(bits(answer), bits(self._rollout(operation, trained))):
                raise UserError(
                    f"with every operation before it corrected, the trainer's {operation} does not give the same bits "
                    "twice, so nothing can be attributed; make it deterministic on this machine."
                )
            return answer

        return Mismatch.of(self._trainer.log_probs(self._recording, correct), self._recording.log_probs)

    def _correct(self, operation: Operation, trained: torch.Tensor) -> torch.Tensor:
        if operation not in self._local:
            return trained
        recorded, local = self._rollout(operation, trained), self._local[operation].to(trained.device)
        moved = (trained.double() + (recorded.double() - local.double())).to(trained.dtype)
        # float64 cannot hold the difference of two numbers 2^29 apart, nor that of two infinities.
        moved = torch.where(bits(trained) == bits(local), recorded, moved)
        if operation.kind != "choice":
            return moved
        # A choice of experts is no number: a token that goes where it goes on the rollout's inputs takes the rollout's
        # choice, with weights corrected if the experts are the same; any other keeps the trainer's.
        as_local = ((trained != 0) == (local != 0)).all(dim=-1, keepdim=True)
        same_experts = ((recorded != 0) == (local != 0)).all(dim=-1, keepdim=True)
        return torch.where(as_local, torch.where(same_experts, moved, recorded), trained)
