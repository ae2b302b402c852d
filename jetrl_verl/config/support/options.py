# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows about the ``jetrl`` node alone: options that contradict each other. ``JetConfig`` reads them."""

from jetrl_verl.formats.catalog import FLOW, FORMATS, QUANTIZED_CACHES, SCALE_RULES, UNQUANTIZED

from .row import Get, Row, Scope, other_than
from .scopes import EXACT, PRECISION, ROLLOUT_LOG_PROBS, value_of, where


def _keeps_no_scales(get: Get) -> bool:
    traits = FORMATS.get(get("jetrl.rollout"))
    return traits is None or not traits.keeps_scales


_FP8_ROLLOUT = ("precision=fp8_rollout",)
_BASELINE = Scope(
    PRECISION,
    "a precision of BF16 training and a quantized rollout",
    lambda get: get("jetrl.train") == UNQUANTIZED != get("jetrl.rollout"),
    _FP8_ROLLOUT,
)
_UNQUANTIZED = Scope(
    PRECISION,
    "BF16 linear layers in training, rollout, reference policy and critic",
    lambda get: all(get(f"jetrl.{name}") == UNQUANTIZED for name in ("train", "rollout", "ref", "critic")),
    ("precision=bf16_shared",),
)
_BF16_LINEARS = Scope(
    "jetrl.rollout=bf16",
    "`jetrl.train=bf16` and `jetrl.rollout=bf16`",
    lambda get: get("jetrl.train") == get("jetrl.rollout") == UNQUANTIZED,
    ("precision=bf16_shared",),
)
_STOCK_TRAINING = Scope(
    "jetrl.operations=stock",
    f"`jetrl.train={FLOW}` and `jetrl.operations=stock`",
    lambda get: get("jetrl.train") == FLOW and get("jetrl.operations") == "stock",
    ("precision=jet_fp8", "jetrl.operations=stock"),
)
_NO_FP8_TRAINING = Scope(
    "jetrl.train=bf16",
    "`jetrl.train=bf16` and `jetrl.critic=bf16`",
    lambda get: get("jetrl.train") == get("jetrl.critic") == UNQUANTIZED,
    _FP8_ROLLOUT,
)

OPTION_ROWS: tuple[Row, ...] = (
    Row(
        "rollout_of_fp8_training",
        "an INT8 or BF16 rollout of FP8 training",
        where("jetrl.train", FLOW, example=("precision=jet_fp8",)),
        "it would sample from another policy than it trains",
        {"jetrl.rollout": other_than(FLOW, example=UNQUANTIZED)},
    ),
    *(
        Row(
            f"scale_rule_of_{traits.name}",
            f"another scale rule of {traits.label}",
            where("jetrl.rollout", traits.name, example=(f"precision={traits.name}_rollout",)),
            f"{traits.label} has one scale rule",
            {"jetrl.scale_rule": other_than(*traits.scale_rules, example=SCALE_RULES[-1])},
        )
        for traits in FORMATS.values()
        if len(traits.scale_rules) == 1
    ),
    Row(
        "int8_scales_without_int8",
        "INT8 scales without an INT8 rollout",
        Scope(
            value_of("jetrl.rollout", "jetrl.rollout"),
            "a rollout in another format than INT8",
            _keeps_no_scales,
            _FP8_ROLLOUT,
        ),
        "the rollout has no INT8 weights",
        {"jetrl.int8_scales": other_than("sync", example="first")},
        ", or precision=int8_rollout",
    ),
    Row(
        "bf16_with_stock_operations",
        "BF16 linear layers with stock operations",
        _BF16_LINEARS,
        "without shared operations it is precision=bf16",
        {"jetrl.operations": other_than("shared", example="stock")},
        ", or precision=bf16",
    ),
    Row(
        "options_of_no_format",
        "options of a quantization without one",
        _UNQUANTIZED,
        "no linear layer is quantized",
        {
            "jetrl.scale_rule": other_than("fp32", example="pow2"),
            "jetrl.unfit_layers": other_than("stop", example="skip"),
            "jetrl.invariant_scaling": other_than(1, example=1.5),
        },
    ),
    Row(
        "backward_without_fp8_training",
        "an option of the FP8 backward without FP8 training",
        _NO_FP8_TRAINING,
        "no model trains in FP8",
        {"jetrl.backward": other_than(FLOW, example=UNQUANTIZED)},
        ", or precision=jet_fp8",
    ),
    Row(
        "rollout_log_probs_of_another_precision",
        "the rollout's log-probabilities as the old ones of another precision",
        ROLLOUT_LOG_PROBS,
        "only jet_fp8_exact has them equal in every bit",
        {"jetrl.precision": other_than("jet_fp8_exact", example="jet_fp8")},
        ", or jetrl.old_log_probs=compute",
    ),
    Row(
        "rollout_log_probs_with_calibration",
        "calibrated clipping of the rollout's log-probabilities",
        ROLLOUT_LOG_PROBS,
        "its BF16 shadow forward runs next to that of the old log-probabilities",
        {"jetrl.clip": other_than("fixed", example="calibrated")},
        ", or jetrl.old_log_probs=compute",
    ),
    Row(
        "kv_cache_of_stock_operations",
        "an FP8 KV cache of FP8 training",
        _STOCK_TRAINING,
        "the trainer's attention would see other keys and values than the rollout's",
        {"jetrl.kv_cache": other_than(UNQUANTIZED, example=QUANTIZED_CACHES[0].name)},
        ", or jetrl.operations=shared",
    ),
    Row(
        "exact_without_shared_operations",
        "stock operations",
        EXACT,
        "that is another precision",
        {"jetrl.operations": other_than("shared", example="stock")},
        ", or precision=jet_fp8",
    ),
    Row(
        "exact_with_layers_left_out",
        "layers left out of FP8",
        EXACT,
        "a BF16 linear layer is not shared",
        {
            "jetrl.train": other_than(FLOW, example=UNQUANTIZED),
            "jetrl.unfit_layers": other_than("stop", example="skip"),
        },
    ),
    Row(
        "operations_of_a_baseline",
        "shared operations of a baseline",
        _BASELINE,
        "each side of a baseline runs its own operations",
        {"jetrl.operations": other_than("stock", "auto", example="shared")},
        ", or precision=jet_fp8",
    ),
)
