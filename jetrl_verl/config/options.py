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
"""The options of the project: what the ``jetrl`` node of a composed config may say.

A non-bf16 precision group fills this node; the user overrides single fields (``jetrl.scale_rule=pow2``).
``JetConfig`` is the same node as a frozen dataclass, and the only place that knows which values and which
combinations are meaningful. Nothing here imports torch, verl or vLLM: vLLM workers and the command line read it too.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

PRECISIONS: tuple[str, ...] = (
    "bf16",
    "fp8_rollout",
    "fp8_rollout_tis",
    "int8_rollout",
    "int8_rollout_tis",
    "qurl_fp8",
    "qurl_int8",
    "jet_fp8",
    "jet_fp8_exact",
)
"""Choices of the Hydra group ``precision``; ``bf16``, the default, leaves verl as it is."""


class UnsupportedConfiguration(ValueError):
    """A configuration that this precision cannot serve; the message is one sentence: what is wrong, what to use."""


_CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": PRECISIONS[1:],
    "train": ("fp8", "bf16"),
    "rollout": ("fp8", "int8", "bf16"),
    "scale_rule": ("fp32", "pow2"),
    "backward": ("fp8", "bf16"),
    "unfit_layers": ("stop", "skip"),
    "ref": ("bf16", "fp8"),
    "critic": ("bf16", "fp8"),
    "contract_check": (True, False),
    "metrics": (True, False),
    "operations": ("auto", "stock", "shared"),
    "int8_scales": ("sync", "first"),
    "clip": ("fixed", "calibrated"),
    "correction": ("fixed", "adaptive"),
}


@dataclass(frozen=True)
class JetConfig:
    """Options of one run, validated.

    Raises ``UnsupportedConfiguration`` for a value outside the choices or a combination without a meaning.
    """

    precision: str
    """Group that was chosen on the command line; names the run in reports."""

    train: str
    """``fp8``: the actor's linear layers run their GEMMs in FP8; ``bf16``: stock training."""

    rollout: str
    """``fp8``: vLLM runs the same FP8 linear layers, fed with the trainer's codes; ``int8``: per-channel weights and
    per-token activations."""

    scale_rule: str = "fp32"
    """``fp32`` (``amax / 448``) or ``pow2`` (the next power of two); see ``numerics.scales``."""

    backward: str = "fp8"
    """``bf16`` runs DGrad and WGrad in BF16 while FProp stays FP8."""

    unfit_layers: str = "stop"
    """A layer whose shape does not fit 128: ``stop`` the run, or ``skip`` it, in BF16 on both sides."""

    ref: str = "bf16"
    """Precision of the reference policy's linear layers."""

    critic: str = "bf16"
    """Precision of the critic's linear layers."""

    contract_check: bool = True
    """Compare both sides' layers, codes and probe GEMM at start and after each weight sync."""

    metrics: bool = True
    """Report what quantisation, truncation and clipping do; see ``observe.quantisation`` and ``observe.mismatch``."""

    operations: str = "stock"
    """Norms, rotary, activation, attention and logits: each side's own (``stock``), or one implementation for both
    (``shared``). ``auto`` stands for one of the two until ``operations.resolve_operations`` has said which."""

    int8_scales: str = "sync"
    """Scales of INT8 weights: made anew at every weight ``sync``, or kept from the ``first`` one of the run while the
    weights move, as FlashRL keeps those of its profile; what outgrows them saturates."""

    clip: str = "fixed"
    """``calibrated`` moves verl's clip bounds every ``clip_interval`` steps; see ``algorithms.calibrated_clipping``."""

    clip_interval: int = 20
    """Steps from one calibration to the next."""

    correction: str = "fixed"
    """``adaptive`` lets the strength of the importance weights follow the batch; see
    ``algorithms.adaptive_correction``."""

    correction_scale: float = 1e-3
    """Divergence, in nats a token, at which ``adaptive`` corrects half."""

    invariant_scaling: float = 1.0
    """Factor folded into the norms before q, k, v, gate and up; see ``algorithms.invariant_scaling``."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            # `1 in (True, False)` holds in Python; the type has to agree too.
            if not any(value == choice and type(value) is type(choice) for choice in choices):
                listed = ", ".join(str(choice).lower() if isinstance(choice, bool) else choice for choice in choices)
                raise UnsupportedConfiguration(f"jetrl.{name}={value} is not a choice; use one of {listed}.")
        for name, kind in (
            ("clip_interval", int),
            ("correction_scale", int | float),
            ("invariant_scaling", int | float),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < float("inf"):
                raise UnsupportedConfiguration(f"jetrl.{name}={value} is not a choice; use a positive number.")
        if self.rollout == "int8" and self.train == "fp8":
            raise UnsupportedConfiguration(
                "jetrl.train=fp8 with jetrl.rollout=int8 would sample from another policy than it trains; "
                "use jetrl.rollout=fp8 or jetrl.train=bf16."
            )
        if self.rollout == "int8" and self.scale_rule != "fp32":
            raise UnsupportedConfiguration(
                f"jetrl.rollout=int8 knows one scale rule, not jetrl.scale_rule={self.scale_rule}; use fp32."
            )
        if self.rollout != "int8" and self.int8_scales != "sync":
            raise UnsupportedConfiguration(
                f"jetrl.int8_scales={self.int8_scales} speaks about an INT8 rollout, and this one is {self.rollout}; "
                "remove it or use precision=int8_rollout."
            )
        if self.rollout == "bf16":
            if self.train == "fp8":
                raise UnsupportedConfiguration(
                    "jetrl.train=fp8 with jetrl.rollout=bf16 would sample from another policy than it trains; "
                    "use jetrl.rollout=fp8."
                )
            raise UnsupportedConfiguration(
                "jetrl.train=bf16 with jetrl.rollout=bf16 leaves nothing in FP8; use precision=bf16."
            )
        if (self.train == "fp8") != self.precision.startswith("jet_fp8"):
            other = "jet_fp8" if self.train == "fp8" else f"{self.rollout}_rollout"
            raise UnsupportedConfiguration(
                f"precision={self.precision} with jetrl.train={self.train} is what precision={other} names; use that."
            )
        if (named := "int8" if "int8" in self.precision else "fp8") != self.rollout:
            other = self.precision.replace(named, self.rollout)
            raise UnsupportedConfiguration(
                f"precision={self.precision} with jetrl.rollout={self.rollout} is what precision={other} names; use "
                "that."
            )
        if self.backward == "bf16" and "fp8" not in (self.train, self.critic):
            raise UnsupportedConfiguration(
                "jetrl.backward=bf16 speaks about models that train in FP8, and there is none; remove it or use "
                "precision=jet_fp8."
            )
        if self.precision == "jet_fp8_exact":
            if self.operations != "shared":
                raise UnsupportedConfiguration(
                    f"precision=jet_fp8_exact with jetrl.operations={self.operations} is what precision=jet_fp8 names; "
                    "use that."
                )
            if self.unfit_layers != "stop":
                raise UnsupportedConfiguration(
                    "precision=jet_fp8_exact has no shared BF16 linear for a layer that jetrl.unfit_layers=skip would "
                    "leave out; use jetrl.unfit_layers=stop."
                )
        elif self.precision != "jet_fp8" and self.operations != "stock":
            raise UnsupportedConfiguration(
                f"precision={self.precision} is a baseline whose sides each run their own operations, not "
                f"jetrl.operations={self.operations}; use precision=jet_fp8."
            )

    @classmethod
    def from_node(cls, node: "Mapping[str, Any] | JetConfig") -> "JetConfig":
        """Build from the ``jetrl`` node (any mapping, e.g. a ``DictConfig``); a ``JetConfig`` is returned as it is."""
        if isinstance(node, JetConfig):
            return node
        known = [field.name for field in fields(cls)]
        for key in node:
            if key not in known:
                raise UnsupportedConfiguration(f"jetrl.{key} is not an option; use one of {', '.join(known)}.")
        if any(name not in node for name in ("precision", "train", "rollout")):
            raise UnsupportedConfiguration(
                f"the jetrl options need a precision; add precision=<{'|'.join(PRECISIONS[1:])}>."
            )
        return cls(**{key: node[key] for key in node})

    def as_dict(self) -> dict[str, Any]:
        """The node again, as plain Python values."""
        return asdict(self)
