# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/support.md from the table of what is supported with what (jetrl_verl/config/support/).

python scripts/support_page.py
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jetrl_verl.config.support.algorithms import ALGORITHM_ROWS  # noqa: E402
from jetrl_verl.config.support.limits import PINS, WGRAD_IN_TRITON  # noqa: E402
from jetrl_verl.config.support.machine import MACHINE_ROWS, MODEL_ROWS  # noqa: E402
from jetrl_verl.config.support.operations import NOTE_ROWS  # noqa: E402
from jetrl_verl.config.support.options import OPTION_ROWS  # noqa: E402
from jetrl_verl.config.support.rollout import ROLLOUT_ROWS  # noqa: E402
from jetrl_verl.config.support.row import EVERY, Row, Scope  # noqa: E402
from jetrl_verl.config.support.scopes import AUTO, EXACT, SHARED  # noqa: E402
from jetrl_verl.config.support.table import TABLE  # noqa: E402
from jetrl_verl.config.support.training import TRAINING_ROWS  # noqa: E402
from jetrl_verl.config.support.workers import COMMAND_ROWS, WORKER_ROWS  # noqa: E402
from jetrl_verl.models import family, model_types  # noqa: E402

PAGE = ROOT / "docs" / "support.md"

SUMMARY = """\
# What is supported with what

- **Training**: FSDP and FSDP2, FP32 or BF16 weights, whole or LoRA merged into them; no Megatron, no
  quantization-aware training.
- **Rollout**: vLLM, tensor and data parallel, BF16 activations; on the trainer's GPUs with verl's naive weight sync, or
  on GPUs of its own (`separate_async`) with `rollout.checkpoint_engine.backend=jetrl`.
- **Models**: text decoders of type {types}.
- **Images**: models of type {towers}, under every precision but `jet_fp8_exact`; no videos.
- **Machines**: NVIDIA GPUs of compute capability 8.9 or newer. Only Hopper (H100, H200) has been run on.
- **Releases**: verl {verl}, vLLM {vllm}, torch {torch}, transformers {transformers}.
- **Equality in every bit** (`precision=jet_fp8_exact`): Hopper, heads of 64, 128 or 256, SiLU, no sliding windows;
  samples of the whole softmax, without `top_p`, `top_k` or penalties.
- `jet_fp8` runs where the shared operations do not, with each side's own operations; log-probabilities then differ.
- What is not supported stops with one sentence: "X is not supported with Y: why. Set Z." The driver builds the
  trainer's model without weights and asks plugins of vLLM what they replaced, so it stops before a GPU is taken; the
  section "In a worker" has the three exceptions.

`python scripts/support_page.py` writes this page from `jetrl_verl/config/support/`, which the checks read. A row is
something that is *not* supported; its remedy is the value to set, or `precision=bf16`. Keys are written without
`actor_rollout_ref.`."""

NOTES = (
    "`jet_fp8` with a rollout over several GPUs: the trainer multiplies o and down in as many slices of K as the "
    "rollout has ranks, since those round there: 0.9 to 1.4% of an update at TP 2 to 8 (8B, 8192 tokens, H200).",
    "Small micro-batches of small models take BF16's time: the update is host-bound. `jetrl.gathered=batch` takes a "
    "fifth of an update away.",
    "Without the Hopper kernels (no nvcc when the package was installed) an FP8 WGrad runs in Triton at "
    f"{WGRAD_IN_TRITON} of BF16's speed; `jetrl.backward=auto` is then `bf16` for a dense model, and the first lines "
    "of a run say so.",
    "`jetrl reshard` does not support FSDP1 checkpoints and remote paths; a run resumes on another number of GPUs with "
    "FSDP2 alone.",
    "A single request, as of a validation or an agent loop, may set `top_p`, `top_k` or penalties under shared "
    "operations; it gets vLLM's own log-probabilities.",
)
"""What runs, at a price, or stops another command: no row, since no run is refused."""

AT_THE_COMMAND_LINE = "Refused at the command line"
IN_THE_DRIVER = "Refused in the driver, before Ray starts, and what GPUs the cluster has right after"
WITH_EVERY_PRECISION = ", with every precision but `bf16` where the table names no other setting."


def of(scope: Scope) -> list[Row]:
    """The rows of a scope that has a section of its own, but those that only a worker sees."""
    return [row for name, row in TABLE.items() if row.scope is scope and name not in WORKER_ROWS]


def rest(rows: Mapping[str, Row]) -> list[Row]:
    """The other rows of a part of the table."""
    return [row for row in rows.values() if row.scope not in (SHARED, AUTO, EXACT)]


SECTIONS = (
    ("Training and model", AT_THE_COMMAND_LINE + WITH_EVERY_PRECISION, rest(TRAINING_ROWS)),
    ("Rollout", AT_THE_COMMAND_LINE + WITH_EVERY_PRECISION, rest(ROLLOUT_ROWS)),
    ("Losses, clipping, corrections", f"{AT_THE_COMMAND_LINE}.", rest(ALGORITHM_ROWS)),
    ("Options", f"{AT_THE_COMMAND_LINE}.", rest(OPTION_ROWS)),
    ("The machine", IN_THE_DRIVER + WITH_EVERY_PRECISION, rest(MACHINE_ROWS)),
    ("The model's files", IN_THE_DRIVER + WITH_EVERY_PRECISION, rest(MODEL_ROWS)),
    (
        "Shared operations",
        "Under `jetrl.operations=auto`, the default of `jet_fp8`, these make the operations `stock`, and a line at the "
        "start of the run names each. Under `jetrl.operations=shared`, as `jet_fp8_exact` sets it, they are refused; "
        "`precision=jet_fp8 jetrl.operations=stock` or `precision=bf16` runs each of them.",
        of(SHARED),
    ),
    (
        "What `auto` decides by default",
        "Under `jetrl.operations=auto` these make the operations `stock`; `jetrl.operations=shared` is accepted.",
        of(AUTO),
    ),
    (
        "Equality in every bit",
        "Refused by `precision=jet_fp8_exact` alone; `precision=jet_fp8` runs each of them, and a line at the start "
        "names it.",
        of(EXACT),
    ),
    (
        "What a line at the start names",
        "FP8 training with these is neither refused nor less exact for the tokens that the current policy samples.",
        NOTE_ROWS.values(),
    ),
    (
        "In a worker",
        "No file and no process of the driver's machine shows these, so the worker that builds the engine, or the "
        "trainer's first forward, refuses them after the GPUs are taken, also where the driver has made "
        "`jetrl.operations=auto` `shared`.",
        WORKER_ROWS.values(),
    ),
    ("Commands", "", COMMAND_ROWS.values()),
)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def document() -> str:
    """docs/support.md."""
    types = sorted(model_types())
    families = {name: family({"model_type": name}) for name in types}
    towers = [name for name in types if families[name].tower]
    parts = [SUMMARY.format(types=_listed(types), towers=_listed(towers), **PINS)]
    for title, text, rows in SECTIONS:
        parts += [f"## {title}", *filter(None, [text]), table(rows)]
    parts += ["## Supported, at a price", "\n".join(f"- {note}" for note in NOTES)]
    return "\n\n".join(parts) + "\n"


def table(rows: Iterable[Row]) -> str:
    """The rows in Markdown, without columns that are empty or the same in all of several."""
    lines = [("not supported", "setting", "with", "why", "remedy"), *map(cells, rows)]
    columns = [
        column for column in zip(*lines, strict=True) if any(column[1:]) and (len(lines) == 2 or len({*column[1:]}) > 1)
    ]
    lines = list(zip(*columns, strict=True))
    lines.insert(1, ("---",) * len(columns))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(row: Row) -> tuple[str, ...]:
    """Feature, settings, scope, reason and remedy of a row; a section says what leaves a scope of its own."""
    settings: dict[str, list[str]] = {}
    for key, values in row.settings.items():
        settings.setdefault(values.text, []).append(f"`{key}`")
    uses = " or ".join(dict.fromkeys(f"`{values.use}`" for values in row.settings.values()))
    leave = "" if uses and row.scope in (EVERY, SHARED, EXACT) else row.scope.leave
    setting = "; ".join(f"{', '.join(keys)} {text}" for text, keys in settings.items())
    scope = "" if row.scope is EVERY else row.scope.text
    remedy = row.instead or f"Set {', or '.join(filter(None, [uses, row.fix, leave]))}"
    reason = f"{row.reason}; {row.loses}" if row in NOTE_ROWS.values() else row.reason
    return tuple(cell.replace("actor_rollout_ref.", "") for cell in (row.feature, setting, scope, reason, remedy))


if __name__ == "__main__":
    PAGE.write_text(document())
