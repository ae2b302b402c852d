# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""docs/support.md, and the block of README between its markers, from the table."""

import re
from collections.abc import Iterable

from .algorithms import ALGORITHM_ROWS
from .commands import COMMAND_ROWS
from .general import GENERAL_ROWS
from .limits import PINS, WGRAD_IN_TRITON
from .machine import MACHINE_ROWS
from .operations import EXACT_ROWS, SHARED_ROWS
from .options import OPTION_ROWS
from .row import COMPOSITION, DRIVER, WORKER, Row
from .scopes import AUTO, EVERY, EXACT
from .table import TABLE
from .workers import WORKER_ROWS

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
"""Markers of README's block."""

_KNOWN = {
    COMPOSITION: "the composed configuration",
    DRIVER: "the driver, before Ray starts",
    WORKER: "a worker, as it builds",
}

_SUPPORTED = (
    ("training", "FSDP and FSDP2, full weights in FP32 or BF16"),
    (
        "rollout",
        "vLLM with tensor and data parallelism, BF16 activations, the naive weight sync, on the trainer's GPUs",
    ),
    ("models", "text decoders of type {types}"),
    (
        "machines",
        "NVIDIA GPUs of compute capability 8.9 or newer; verl {verl}, vLLM {vllm}, torch {torch}, "
        "transformers {transformers}",
    ),
)

NOTES = (
    "`jet_fp8` with a rollout over several GPUs: the trainer multiplies o and down in as many slices of K as the "
    "rollout has ranks, since those round there: 0.9 to 1.4% of an update at TP 2 to 8 (8B, 8192 tokens, H200).",
    "Small micro-batches of small models take BF16's time: the GPU waits for its host, which has as much to do for a "
    "layer in FP8. `jetrl.gathered=batch` takes a fifth of an update away.",
    "Without the Hopper kernels (no nvcc when the package was installed) WGrad runs in Triton at "
    f"{WGRAD_IN_TRITON} of BF16's speed; a line at the start of a run says so.",
    "`jetrl reshard` does not support FSDP1 checkpoints and remote paths; a run resumes on another number of GPUs with "
    "FSDP2 alone.",
    "A single request, as of a validation or an agent loop, may set `top_p`, `top_k` or penalties under shared "
    "operations; it gets vLLM's own log-probabilities.",
)
"""What is supported, at a price, or stops another command: no row, since no run is refused."""


def document() -> str:
    """docs/support.md."""
    parts = [
        "# What is supported with what",
        "`python -m jetrl_verl.config.support` prints this page from the table that the checks read "
        '(`jetrl_verl/config/support/`). A row is something that is *not* supported. Messages have one form: "X is not '
        'supported with Y: why. Set Z."',
        "Supported:",
        "\n".join(f"- **{name}**: {text}." for name, text in _supported()),
        'In the tables `actor_rollout_ref.` is left out of keys, and "known by" says when it can be known.',
    ]
    for title, text, rows in (
        (
            "Every precision but `bf16`",
            "Refused.",
            [row for row in (*GENERAL_ROWS, *MACHINE_ROWS) if not _of_operations(row)],
        ),
        (
            "Shared operations",
            "Under `jetrl.operations=auto`, the default of `jet_fp8`, these make the operations `stock`, and a line on "
            "stderr says so. Under `jetrl.operations=shared`, as `jet_fp8_exact` sets it, they are refused.",
            [row for row in (*SHARED_ROWS, *MACHINE_ROWS, *WORKER_ROWS) if _of_operations(row) and row.scope.refused],
        ),
        (
            "What the driver cannot know",
            "Under `jetrl.operations=auto` these make the operations `stock`; `jetrl.operations=shared` is accepted.",
            [row for row in TABLE if row.scope is AUTO],
        ),
        (
            "Equality in every bit",
            "Refused by `precision=jet_fp8_exact`, and by nothing else: the two sides would differ in the last bits.",
            [*EXACT_ROWS, *(row for row in OPTION_ROWS if row.scope.doc == EXACT.doc)],
        ),
        ("Losses, clipping, corrections", "Refused.", list(ALGORITHM_ROWS)),
        ("Options", "Refused.", [row for row in OPTION_ROWS if row.scope.doc != EXACT.doc]),
        (
            "Workers",
            "Refused. Neither a configuration nor a `config.json` shows it, but the objects that verl, transformers or "
            "vLLM build.",
            [row for row in WORKER_ROWS if not _of_operations(row)],
        ),
        ("Commands", "Refused.", list(COMMAND_ROWS)),
    ):
        parts += [f"## {title}", text, _table(rows)]
    parts += ["## Supported, at a price", "\n".join(f"- {note}" for note in NOTES)]
    return "\n\n".join(parts) + "\n"


def readme_block() -> str:
    """What stands between ``BEGIN`` and ``END`` in README."""
    groups = {
        "training": ("engine", "lora", "qat", "mtp", "old_trainer"),
        "rollout": (
            "rollout_engine",
            "pipeline_parallel",
            "expert_parallel",
            "speculation",
            "kv_cache",
            "weight_sync",
            "disaggregation",
            "separate_gpus",
        ),
        "models": ("model_type", "quantized_checkpoint", "layer_shard_shape", "fused_kernels_of_a_padded_vocabulary"),
        "machines": ("npu", "rocm", "gpu_without_fp8", "version"),
    }
    by_name = {row.name: row for row in TABLE}
    lines = ["| | supported | not supported |", "|---|---|---|"]
    lines += [
        f"| {name} | {text} | {', '.join(by_name[row].feature for row in groups[name])} |"
        for name, text in _supported()
    ]
    stock = _features(row for row in TABLE if row.scope.stock and row.listed)
    exact = _features(row for row in TABLE if row.scope.doc == EXACT.doc and row.listed)
    lines.append(f"| shared operations | Hopper, as above | `jet_fp8` runs stock ones with: {stock} |")
    lines.append(f"| equality in every bit | `jet_fp8_exact` | {exact} |")
    lines.append(
        "| also | | small micro-batches of small models take BF16's time; `jetrl reshard` does not support FSDP1 "
        "checkpoints and remote paths |"
    )
    return "\n".join([BEGIN, *lines, END])


def _supported() -> list[tuple[str, str]]:
    from jetrl_verl.models import model_types

    words = {"types": ", ".join(f"`{name}`" for name in sorted(model_types())), **PINS}
    return [(name, text.format(**words)) for name, text in _SUPPORTED]


def _of_operations(row: Row) -> bool:
    return row.scope.stock


def _features(rows: Iterable[Row]) -> str:
    return ", ".join(dict.fromkeys(row.feature for row in rows))


def _table(rows: list[Row]) -> str:
    with_scope = any(row.scope.doc != rows[0].scope.doc for row in rows)
    head = ["what", "setting", *(["with"] if with_scope else []), "why", "remedy", "known by"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        settings = "<br>".join(f"`{_short(key)}`" for key in row.keys)
        if row.wrong is not None:
            settings = f"{settings} {row.wrong.doc}"
        scope = "" if row.scope is EVERY else row.scope.doc
        with_ = [_short(scope)] if with_scope else []
        lines.append([row.feature, settings, *with_, _plain(row.reason), _plain(row.remedy), _KNOWN[row.found]])
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _short(key: str) -> str:
    return key.replace("actor_rollout_ref.", "")


def _plain(template: str) -> str:
    """A row's text for a reader: ``{key}`` is the setting, and a caller's word stands for itself."""
    text = _short(template).replace("Set {key}=", "Set it to ").replace("{key}=", "it to ").replace("{key}", "it")
    text = re.sub(r"\{\{([^}]*)\}\}", r"{\1}", text)
    if text == "{error}":
        return ""
    return re.sub(r"\{([\w.]+)\}", r"*\1*", text.replace("${jetrl}", "`${jetrl}`"))
