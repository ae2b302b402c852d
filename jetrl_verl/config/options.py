# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The options of the project: the ``jetrl`` node of a composed config as a frozen dataclass.

A precision fills the node, the user overrides fields, and ``composition`` validates them, once, on the driver.
"""

from dataclasses import asdict, dataclass
from typing import Any

from jetrl_verl.formats.catalog import FLOW, UNQUANTIZED

PRECISIONS: tuple[str, ...] = (
    "bf16",
    "bf16_shared",
    "fp8_rollout",
    "fp8_rollout_tis",
    "int8_rollout",
    "int8_rollout_tis",
    "qurl_fp8",
    "qurl_int8",
    "jet_fp8",
    "jet_fp8_exact",
)
"""Choices of the Hydra group ``precision``: presets, each a YAML file of defaults. ``bf16`` leaves verl as it is."""


@dataclass(frozen=True)
class JetConfig:
    """Options of one run."""

    precision: str
    """Preset that was chosen on the command line; the other fields say what runs."""

    train: str
    """``fp8``: the actor's linear layers run their GEMMs in FP8; ``bf16``: stock training."""

    rollout: str
    """``fp8``: vLLM runs the same FP8 linear layers, fed with the trainer's qdata; ``int8``: per-channel weights and
    per-token activations; ``bf16``: vLLM's own, under shared operations alone."""

    scale_rule: str = "fp32"
    """``fp32`` (``amax / 448``) or ``pow2`` (the next power of two); see ``reference.scales``."""

    backward: str = FLOW
    """``bf16`` runs DGrad and WGrad in BF16 while FProp stays FP8. ``auto`` stands for one of the two until
    ``composition.resolve`` has decided."""

    unfit_layers: str = "stop"
    """A layer whose shape does not fit 128: ``stop`` the run, or ``skip`` it, in BF16 on both sides."""

    ref: str = "bf16"
    """Precision of the reference policy's linear layers."""

    critic: str = "bf16"
    """Precision of the critic's linear layers."""

    contract_check: bool = True
    """Compare both sides' layers, qdata and probe GEMM at start and after each weight sync."""

    metrics: bool = True
    """Report what quantization, truncation and clipping do; see ``metrics.quantization`` and ``metrics.mismatch``."""

    operations: str = "stock"
    """Norms, rotary, activation, attention and logits: each side's own (``stock``), or one implementation for both
    (``shared``). ``auto`` stands for one of the two until ``composition.resolve`` has decided."""

    int8_scales: str = "sync"
    """Scales of INT8 weights: computed at every weight ``sync``, or kept from the ``first`` one of the run while the
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

    old_log_probs: str = "compute"
    """``rollout`` uses the rollout's log-probabilities as the old ones and checks one micro-batch of each step; see
    ``algorithms.old_log_probs``."""

    kv_cache: str = "bf16"
    """What the rollout's KV cache holds. ``fp8``: keys and values in E4M3 with a power of two per token and head
    (``reference.kv_cache``), which the trainer's attention sees too where operations are shared."""

    gathered: str = "pass"
    """How long FSDP2's gathered weights stay: for a ``pass`` of their layer, or for all micro-batches of a ``batch``;
    see ``train.gathered``."""

    checkpointing: str = "auto"
    """What the actor's decoder layers keep for their recomputation: their input (``full``), also results of products
    and attention (``selective``), or those in as many layers as memory allows (``auto``); see ``train.checkpointing``.
    Without shared operations ``auto`` is ``full``."""

    invariant_scaling: float = 1.0
    """Factor folded into the norms before q, k, v, gate and up; see ``algorithms.invariant_scaling``."""

    @property
    def reduction(self) -> str:
        """How a rollout over several GPUs adds its ranks' products: ``ordered``, as a trainer in the flow repeats it,
        or ``stock``, as vLLM does."""
        return "stock" if self.train == UNQUANTIZED else "ordered"

    def as_dict(self) -> dict[str, Any]:
        """The node again, as plain Python values."""
        return asdict(self)
