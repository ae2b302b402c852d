# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Where two sides that compute the same chain of operations part, and how much of their mismatch each kind makes.

Let operation k take outputs of earlier operations: ``y_k = op_k(x_k)`` with ``x_k`` made of ``y_1 .. y_{k-1}``. The
rollout R computes ``y_R`` from its ``x_R`` with its own ``op_R``, the trainer T ``y_T = op_T(x_T)``. ``y_T - y_R`` says
little about operation k, since x_T and x_R differ already. Its own, local difference does:

    e_k = y_R - op_T(x_R)         the trainer's operation on the rollout's inputs, against the rollout's output

It is zero in every element exactly where both sides' operations agree on what the rollout fed them. One forward of the
trainer finds all of them: each output is looked at and then replaced by the rollout's, which makes the next input x_R.

*Correcting* a kind of operations runs the trainer with, for every operation of that kind,

    y_T(x_T) + e_k                in float64, rounded to the type of y_T

in its place. With all kinds corrected, x_T = x_R at the first operation, so what it gives is op_T(x_R) + e = y_R, which
makes x_T = x_R at the next, and so on to the log-probabilities: **they equal the rollout's in every bit**. This is
checked at each operation, so the numbers below cannot rest on a chain that was cut wrongly or on an operation that does
not repeat itself. (Where y_T(x_T) equals op_T(x_R), the sum is y_R by definition and is taken as such: float64 cannot
hold the difference of two numbers 2^29 apart, nor that of two infinities.)

With k3_kl of the trainer against the recorded rollout, per kind K:

    without K    K alone is corrected: what would be left if both sides shared K
    K alone      all others are corrected: what K would cost if it were the only one that differed

A choice of experts is no number, so it is not corrected by a sum: where the trainer chose as it does on the rollout's
inputs, the rollout's row takes its place, and elsewhere the trainer's own stays.

Neither adds up over kinds: differences cancel, and noise that enters before FP8 rounding is made coarser by it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from jetrl_verl.tools.diff import DiffError
from jetrl_verl.tools.diff.measures import Mismatch, Spread, bits, ulps
from jetrl_verl.tools.diff.operations import KINDS, Operation
from jetrl_verl.tools.diff.recording import Recording
from jetrl_verl.tools.diff.trainer import Trainer


@dataclass(frozen=True)
class FirstDifference:
    """The earliest element, by operation, then request, then position, that differs between the two sides."""

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
    """What :func:`attribute` found.

    Attributes:
        log_probs: the trainer's, ``[response tokens]`` FP32. mismatch: of them against the recorded rollout's.
        first: None where nothing differs.
        accumulated: y_T against y_R of each operation, in order. local: op_T(x_R) against y_R.
        without, alone: per kind with a local difference anywhere; of every other kind they are ``mismatch`` and zero.
        all_corrected: against the recorded rollout; zero, or there is no attribution.
    """

    log_probs: torch.Tensor
    mismatch: Mismatch
    first: FirstDifference | None = None
    accumulated: dict[Operation, Spread] = field(default_factory=dict)
    local: dict[Operation, Spread] = field(default_factory=dict)
    without: dict[str, Mismatch] = field(default_factory=dict)
    alone: dict[str, Mismatch] = field(default_factory=dict)
    all_corrected: Mismatch | None = None


def _same_type(operation: Operation, theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """The rollout's output on the trainer's device."""
    if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        raise DiffError(
            f"{operation} gives {list(theirs.shape)} of {theirs.dtype} in the rollout and {list(ours.shape)} of "
            f"{ours.dtype} in the trainer, which cannot be compared; use dtype=bfloat16 on both sides."
        )
    return theirs.to(ours.device)


def _element(operation: Operation, theirs: torch.Tensor, ours: torch.Tensor, recording: Recording) -> FirstDifference:
    row, element = (bits(theirs) != bits(ours)).nonzero()[0].tolist()
    token = int(recording.drawing[row]) if operation.kind in ("lm_head", "sampler") else row
    request, position = recording.place(token)
    a, b = theirs[row, element], ours[row, element]
    return FirstDifference(
        operation.name,
        operation.layer,
        operation.kind,
        request,
        position,
        element,
        a.item(),
        b.item(),
        str(a.dtype).removeprefix("torch."),
        int(ulps(a[None], b[None])),
    )


class _Forwards:
    """The trainer's forwards over one recording."""

    def __init__(self, trainer: Trainer, recording: Recording) -> None:
        self._trainer, self._recording = trainer, recording
        self._theirs = recording.outputs
        # op_T(x_R) where it is not y_R; elsewhere correcting changes nothing.
        self._local: dict[Operation, torch.Tensor] = {}

    def free(self, found: Attribution) -> torch.Tensor:
        """Untouched; fills ``accumulated`` and ``first``."""

        def look(operation: Operation, ours: torch.Tensor) -> torch.Tensor:
            theirs = _same_type(operation, self._theirs[operation], ours)
            spread = found.accumulated[operation] = Spread.of(theirs, ours)
            if spread.differing and found.first is None:
                found.first = _element(operation, theirs, ours, self._recording)
            return ours

        return self._trainer.log_probs(self._recording, look)

    def replaced(self, found: Attribution) -> None:
        """Every operation on the rollout's inputs; fills ``local``."""

        def replace(operation: Operation, ours: torch.Tensor) -> torch.Tensor:
            theirs = _same_type(operation, self._theirs[operation], ours)
            spread = found.local[operation] = Spread.of(theirs, ours)
            if not spread.differing:
                # The very object: a norm may have told the linears behind it the qdata of what it gave.
                return ours
            # A copy: the model may write into its own tensor next.
            self._local[operation] = ours.clone().cpu()
            return theirs

        self._trainer.log_probs(self._recording, replace)

    @property
    def kinds(self) -> list[str]:
        """Those that differ somewhere."""
        found = {operation.kind for operation in self._local}
        return [kind for kind in KINDS if kind in found]

    def _corrected(self, operation: Operation, ours: torch.Tensor) -> torch.Tensor:
        if operation not in self._local:
            return ours
        theirs = self._theirs[operation].to(ours.device)
        local = self._local[operation].to(ours.device)
        if operation.kind == "choice":
            # The same experts: weights that moved with the inputs move the rollout's alike.
            chose, same = ((a != 0) == (b != 0) for a, b in ((ours, local), (theirs, local)))
            chose, same = chose.all(dim=-1, keepdim=True), same.all(dim=-1, keepdim=True)
            whole = torch.where(chose & ~same, theirs, ours)
            return torch.where(chose & same, self._moved(ours, theirs, local), whole)
        return self._moved(ours, theirs, local)

    @staticmethod
    def _moved(ours: torch.Tensor, theirs: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """``ours + (theirs - local)``, and ``theirs`` where ``ours`` is ``local``."""
        moved = (ours.double() + (theirs.double() - local.double())).to(ours.dtype)
        return torch.where(bits(ours) == bits(local), theirs, moved)

    def corrected(self, kinds: Iterable[str]) -> Mismatch:
        """With the operations of ``kinds`` corrected."""
        kinds = set(kinds)

        def correct(operation: Operation, ours: torch.Tensor) -> torch.Tensor:
            return self._corrected(operation, ours) if operation.kind in kinds else ours

        return Mismatch.of(self._trainer.log_probs(self._recording, correct), self._recording.log_probs)

    def all_corrected(self) -> Mismatch:
        """With everything corrected.

        Raises:
            DiffError: an operation does not give the rollout's output.
        """

        def correct(operation: Operation, ours: torch.Tensor) -> torch.Tensor:
            answer = self._corrected(operation, ours)
            if not torch.equal(bits(answer), bits(self._theirs[operation].to(ours.device))):
                raise DiffError(
                    f"with every operation before it corrected, the trainer's {operation} does not give the same bits "
                    "twice, so nothing can be attributed; make it deterministic on this machine."
                )
            return answer

        return Mismatch.of(self._trainer.log_probs(self._recording, correct), self._recording.log_probs)


def attribute(trainer: Trainer, recording: Recording) -> Attribution:
    """Compare ``trainer`` with a recorded rollout.

    Raises:
        DiffError: the two sides are not the same chain of operations, or the trainer's does not repeat itself.
    """
    if set(trainer.operations) != set(recording.outputs):
        (other, *_) = set(trainer.operations) ^ set(recording.outputs)
        raise DiffError(f"{other} runs on one side only; use a decoder of a supported type.")
    forwards = _Forwards(trainer, recording)
    found = Attribution(torch.empty(0), Mismatch(0, 0, 0.0, 0.0, 0.0))
    found.log_probs = forwards.free(found)
    found.mismatch = Mismatch.of(found.log_probs, recording.log_probs)
    forwards.replaced(found)
    found.all_corrected = forwards.all_corrected()
    kinds = forwards.kinds
    for kind in kinds:
        found.without[kind] = forwards.corrected([kind])
        found.alone[kind] = forwards.corrected(other for other in kinds if other != kind)
    return found
