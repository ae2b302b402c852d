# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows about the ``jetrl`` node alone: options that contradict each other. ``JetConfig`` reads them."""

from functools import partial
from itertools import permutations

from jetrl_verl.formats.catalog import FLOW, FORMATS, QUANTIZED_CACHES, SCALE_RULES, UNQUANTIZED

from .row import Get, Row, Scope, Wrong, other_than
from .scopes import EXACT, ROLLOUT_LOG_PROBS

_SAYS = "{key}={value}"


def _equal(*values: object) -> Wrong:
    return Wrong(", ".join(f"`{value}`" for value in values), lambda value, get: value in values)


def _is_named(precision: str, get: Get) -> bool:
    return get("jetrl.precision") == precision


def _rolls_out(name: str, get: Get) -> bool:
    return get("jetrl.rollout") == name


def _with(text: str, applies, *example: str) -> Scope:
    return Scope(text, f"`{text}`", applies, example)


_TRAINS = _with(f"jetrl.train={FLOW}", lambda get: get("jetrl.train") != UNQUANTIZED, "precision=jet_fp8")
_TRAIN_BF16 = _with("jetrl.train=bf16", lambda get: get("jetrl.train") == UNQUANTIZED, "precision=fp8_rollout")
_KEEPS_NO_SCALES = Scope(
    "jetrl.rollout={jetrl.rollout}",
    "a rollout in another format than INT8",
    lambda get: get("jetrl.rollout") not in [name for name, traits in FORMATS.items() if traits.keeps_scales],
    ("precision=fp8_rollout",),
)
_NAMED_FP8 = Scope(
    "precision={jetrl.precision}",
    "`precision=jet_fp8` or `jet_fp8_exact`",
    lambda get: get("jetrl.precision").startswith("jet_fp8"),
    ("precision=jet_fp8",),
)
_NAMED_BF16 = Scope(
    "precision={jetrl.precision}",
    "a precision whose training is BF16",
    lambda get: not get("jetrl.precision").startswith("jet_fp8"),
    ("precision=fp8_rollout",),
)
_NO_FP8_TRAINING = Scope(
    "jetrl.train=bf16",
    "`jetrl.train=bf16` and `jetrl.critic=bf16`",
    lambda get: get("jetrl.train") == get("jetrl.critic") == UNQUANTIZED,
    ("precision=fp8_rollout",),
)
_BASELINE = Scope(
    "precision={jetrl.precision}",
    "a precision of BF16 training and a quantized rollout",
    lambda get: not get("jetrl.precision").startswith("jet_fp8") and get("jetrl.rollout") != UNQUANTIZED,
    ("precision=fp8_rollout",),
)
_TRAINS_WITH_STOCK_OPERATIONS = Scope(
    "jetrl.operations=stock",
    f"`jetrl.train={FLOW}` and `jetrl.operations=stock`",
    lambda get: get("jetrl.train") != UNQUANTIZED and get("jetrl.operations") == "stock",
    ("precision=jet_fp8", "jetrl.operations=stock"),
)
_EXACT = Scope(EXACT.said, EXACT.doc, EXACT.applies, EXACT.example)
_BF16_SHARED = _with("precision=bf16_shared", partial(_is_named, "bf16_shared"), "precision=bf16_shared")
_NO_FORMAT = Scope(
    "precision={jetrl.precision}",
    "`precision=bf16_shared`, unless `jetrl.ref` or `jetrl.critic` is FP8",
    lambda get: all(get(f"jetrl.{name}") == UNQUANTIZED for name in ("train", "rollout", "ref", "critic")),
    ("precision=bf16_shared",),
)

_ANY = Scope("any precision", "any precision", lambda get: True)

OPTION_ROWS: tuple[Row, ...] = (
    Row(
        "option_value",
        "values that an option does not have",
        _ANY,
        "",
        "Set {key} to {choices}",
        listed=False,
    ),
    Row("unknown_option", "options that do not exist", _ANY, "", "Set one of {known}", what="{key}", listed=False),
    Row(
        "options_without_a_precision",
        "options of a precision",
        Scope("precision=bf16", "`precision=bf16`", lambda get: get("jetrl.precision") is None),
        "",
        "Set precision=<{precisions}>",
        what="an option of the jetrl node",
        listed=False,
    ),
    *(
        Row(
            f"{traits.name}_rollout_of_{FLOW}_training",
            f"{traits.label} rollout of FP8 training",
            _TRAINS,
            "it would sample from another policy than it trains",
            f"Set jetrl.rollout={FLOW}, or jetrl.train=bf16",
            ("jetrl.rollout",),
            _equal(traits.name),
            example=traits.name,
        )
        for traits in FORMATS.values()
        if not traits.trains
    ),
    *(
        Row(
            f"scale_rule_of_{traits.name}",
            f"another scale rule of {traits.label}",
            _with(f"jetrl.rollout={traits.name}", partial(_rolls_out, traits.name), f"precision={traits.name}_rollout"),
            f"{traits.label} has one scale rule",
            f"Set jetrl.scale_rule={traits.scale_rules[0]}",
            ("jetrl.scale_rule",),
            other_than(*traits.scale_rules),
            example=next(rule for rule in SCALE_RULES if rule not in traits.scale_rules),
        )
        for traits in FORMATS.values()
        if len(traits.scale_rules) == 1
    ),
    Row(
        "int8_scales_without_int8",
        "INT8 scales without an INT8 rollout",
        _KEEPS_NO_SCALES,
        "the rollout has no INT8 weights",
        "Set jetrl.int8_scales=sync, or precision=int8_rollout",
        ("jetrl.int8_scales",),
        other_than("sync"),
        example="first",
    ),
    Row(
        "bf16_rollout_of_fp8_training",
        "BF16 rollout of FP8 training",
        _TRAINS,
        "it would sample from another policy than it trains",
        "Set jetrl.rollout=fp8",
        ("jetrl.rollout",),
        _equal(UNQUANTIZED),
        example=UNQUANTIZED,
    ),
    Row(
        "bf16_with_stock_operations",
        "BF16 linear layers with stock operations",
        _BF16_SHARED,
        "without shared operations nothing of it is left",
        "Set precision=bf16",
        ("jetrl.operations",),
        other_than("shared"),
        example="stock",
    ),
    Row(
        "nothing_in_fp8",
        "BF16 rollout of BF16 training under the name of another precision",
        _TRAIN_BF16,
        "nothing is left to quantize",
        "Set precision=bf16, or precision=bf16_shared, which shares the operations between the linear layers",
        ("jetrl.rollout",),
        Wrong(
            f"`{UNQUANTIZED}` without `precision=bf16_shared`",
            lambda value, get: value == UNQUANTIZED and not _is_named("bf16_shared", get),
        ),
        example=UNQUANTIZED,
    ),
    Row(
        "quantized_rollout_of_bf16_shared",
        "a rollout under the name of another format",
        _BF16_SHARED,
        "that is another precision",
        "Set precision={jetrl.rollout}_rollout",
        ("jetrl.rollout",),
        other_than(UNQUANTIZED),
        example=FLOW,
        listed=False,
    ),
    *(
        Row(
            f"{option}_of_no_format",
            "options of a quantization without one",
            _NO_FORMAT,
            "no linear layer is quantized",
            f"Set jetrl.{option}={default}",
            (f"jetrl.{option}",),
            other_than(default),
            example=example,
            listed=False,
        )
        for option, default, example in (
            ("scale_rule", "fp32", "pow2"),
            ("unfit_layers", "stop", "skip"),
            ("invariant_scaling", 1, 1.5),
        )
    ),
    Row(
        "bf16_training_under_another_name",
        "BF16 training under the name of FP8 training",
        _NAMED_FP8,
        "that is another precision",
        "Set precision={jetrl.rollout}_rollout",
        ("jetrl.train",),
        other_than(FLOW),
        example=UNQUANTIZED,
        listed=False,
    ),
    Row(
        "fp8_training_under_another_name",
        "FP8 training under the name of BF16 training",
        _NAMED_BF16,
        "that is another precision",
        "Set precision=jet_fp8",
        ("jetrl.train",),
        _equal(FLOW),
        example=FLOW,
        listed=False,
    ),
    *(
        Row(
            f"{other}_rollout_of_{precision}",
            "a rollout under the name of another format",
            _with(f"precision={precision}", partial(_is_named, precision), f"precision={precision}"),
            "that is another precision",
            f"Set precision={precision.replace(named, other)}",
            ("jetrl.rollout",),
            _equal(other),
            example=other,
            listed=False,
        )
        for named, other in permutations(FORMATS, 2)
        for precision in (f"{named}_rollout", f"{named}_rollout_tis", f"qurl_{named}")
    ),
    Row(
        "backward_without_fp8_training",
        "an option of the FP8 backward without FP8 training",
        _NO_FP8_TRAINING,
        "no model trains in FP8",
        "Set jetrl.backward=fp8, or precision=jet_fp8",
        ("jetrl.backward",),
        other_than(FLOW),
        example=UNQUANTIZED,
        listed=False,
    ),
    Row(
        "rollout_log_probs_of_another_precision",
        "the rollout's log-probabilities as the old ones of another precision",
        ROLLOUT_LOG_PROBS,
        "only jet_fp8_exact has them equal in every bit",
        "Set precision=jet_fp8_exact, or jetrl.old_log_probs=compute",
        ("jetrl.precision",),
        other_than("jet_fp8_exact"),
        what="precision={value}",
        example="jet_fp8",
    ),
    Row(
        "rollout_log_probs_with_calibration",
        "calibrated clipping of the rollout's log-probabilities",
        ROLLOUT_LOG_PROBS,
        "its BF16 shadow forward runs beside that of the old log-probabilities",
        "Set jetrl.old_log_probs=compute, or jetrl.clip=fixed",
        ("jetrl.clip",),
        other_than("fixed"),
        example="calibrated",
    ),
    Row(
        "kv_cache_of_stock_operations",
        "an FP8 KV cache of FP8 training",
        _TRAINS_WITH_STOCK_OPERATIONS,
        "the trainer's attention would see other keys and values than the rollout's",
        "Set jetrl.operations=shared, or jetrl.kv_cache=bf16",
        ("jetrl.kv_cache",),
        other_than(UNQUANTIZED),
        example=QUANTIZED_CACHES[0].name,
    ),
    Row(
        "exact_without_shared_operations",
        "stock operations",
        _EXACT,
        "that is another precision",
        "Set jetrl.operations=shared, or precision=jet_fp8",
        ("jetrl.operations",),
        other_than("shared"),
        example="stock",
        listed=False,
    ),
    Row(
        "exact_with_layers_left_out",
        "layers left out of FP8",
        _EXACT,
        "a BF16 linear layer is not shared",
        "Set jetrl.unfit_layers=stop",
        ("jetrl.unfit_layers",),
        other_than("stop"),
        example="skip",
    ),
    Row(
        "operations_of_a_baseline",
        "shared operations of a baseline",
        _BASELINE,
        "each side of a baseline runs its own operations",
        "Set precision=jet_fp8, or jetrl.operations=stock",
        ("jetrl.operations",),
        other_than("stock"),
        example="shared",
    ),
)
