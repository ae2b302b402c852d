# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows about the ``jetrl`` node alone: options that contradict each other. ``composition.parse`` reads them."""

from jetrl_verl.formats.catalog import FORMATS, TRAINED, UNQUANTIZED

from .row import Get, Row, Scope, one_of, other_than
from .scopes import EXACT, FP8_TRAINING, ROLLOUT_LOG_PROBS, SELECTIVE, where

(_INT8,) = (traits for traits in FORMATS.values() if traits.keeps_scales)


def _bf16(get: Get, *options: str) -> bool:
    return all(get(f"jetrl.{option}") == UNQUANTIZED for option in options)


OPTION_ROWS: dict[str, Row] = {
    "rollout_of_fp8_training": Row(
        "an INT8 or BF16 rollout of FP8 training",
        "it would sample from another policy than it trains",
        {"jetrl.rollout": other_than(*TRAINED)},
        scope=FP8_TRAINING,
    ),
    **{
        f"scale_rule_of_{traits.name}": Row(
            f"another scale rule of {traits.label}",
            f"{traits.label} has one scale rule",
            {"jetrl.scale_rule": other_than(*traits.scale_rules)},
            scope=where("jetrl.rollout", traits.name),
        )
        for traits in FORMATS.values()
        if len(traits.scale_rules) == 1
    },
    "int8_scales_without_int8": Row(
        "INT8 scales without an INT8 rollout",
        "the rollout has no INT8 weights",
        {"jetrl.int8_scales": other_than("sync")},
        scope=Scope(
            "a jetrl.rollout other than int8",
            lambda get: get("jetrl.rollout") != _INT8.name,
            "precision=int8_rollout",
            key="jetrl.rollout",
        ),
    ),
    "bf16_with_stock_operations": Row(
        "BF16 linear layers with stock operations",
        "without shared operations it is precision=bf16",
        {"jetrl.operations": other_than("shared")},
        scope=Scope(
            "jetrl.train=bf16 and jetrl.rollout=bf16", lambda get: _bf16(get, "train", "rollout"), "precision=bf16"
        ),
    ),
    "options_of_no_format": Row(
        "options of a quantization without one",
        "no linear layer is quantized",
        {
            "jetrl.scale_rule": other_than("fp32"),
            "jetrl.unfit_layers": other_than("stop"),
            "jetrl.invariant_scaling": other_than(1),
        },
        scope=Scope(
            "BF16 linear layers in training, rollout, reference policy and critic",
            lambda get: _bf16(get, "train", "rollout", "ref", "critic"),
        ),
    ),
    "backward_without_fp8_training": Row(
        "an option of the FP8 backward without FP8 training",
        "no model trains in FP8",
        {"jetrl.backward": other_than("auto", *TRAINED)},
        scope=Scope(
            "jetrl.train=bf16 and jetrl.critic=bf16", lambda get: _bf16(get, "train", "critic"), "precision=jet_fp8"
        ),
    ),
    "rollout_log_probs_of_another_precision": Row(
        "the rollout's log-probabilities as the old ones",
        "only jet_fp8_exact has them equal in every bit",
        {"jetrl.old_log_probs": one_of("rollout", use="compute")},
        scope=Scope(
            "every precision but jet_fp8_exact",
            lambda get: not EXACT.applies(get),
            "precision=jet_fp8_exact",
            key="jetrl.precision",
        ),
    ),
    "rollout_log_probs_with_calibration": Row(
        "calibrated clipping of the rollout's log-probabilities",
        "its BF16 shadow forward runs next to that of the old log-probabilities",
        {"jetrl.clip": other_than("fixed")},
        scope=ROLLOUT_LOG_PROBS,
    ),
    "kv_cache_of_stock_operations": Row(
        "an FP8 KV cache of FP8 training",
        "the trainer's attention would see other keys and values than the rollout's",
        {"jetrl.kv_cache": other_than(UNQUANTIZED)},
        scope=Scope(
            "jetrl.train=fp8 and jetrl.operations=stock",
            lambda get: FP8_TRAINING.applies(get) and get("jetrl.operations") == "stock",
            "jetrl.operations=shared",
        ),
    ),
    "selective_checkpointing_of_stock_operations": Row(
        "stock operations",
        "their layers are recomputed whole",
        {"jetrl.operations": other_than("shared", "auto")},
        scope=SELECTIVE,
    ),
    "exact_without_shared_operations": Row(
        "stock operations",
        "each side runs its own norms, attention and logits",
        {"jetrl.operations": other_than("shared")},
        scope=EXACT,
    ),
    "exact_with_layers_left_out": Row(
        "layers left out of FP8",
        "a BF16 linear layer is not shared",
        {"jetrl.train": other_than(*TRAINED), "jetrl.unfit_layers": other_than("stop")},
        scope=EXACT,
        loses="k3_kl will be above 0 where a layer is left out",
    ),
    "operations_of_a_baseline": Row(
        "shared operations of a baseline",
        "each side of a baseline runs its own operations",
        {"jetrl.operations": other_than("stock", "auto")},
        scope=Scope(
            "BF16 training of a quantized rollout",
            lambda get: _bf16(get, "train") and not _bf16(get, "rollout"),
            "precision=jet_fp8",
            key="jetrl.precision",
        ),
    ),
}
