# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Draw docs/img/step_time.svg, a step's seconds by precision, from a record of verl_step.py.

python3 -m benchmarks.step_time
"""

import argparse
import json
from pathlib import Path

from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
RECORD, PICTURE = ROOT / "benchmarks/results/verl_step_4b_4k_h200.json", ROOT / "docs/img/step_time.svg"
ROWS = {
    "bf16": "BF16",
    "verl_fp8": "BF16, vLLM's FP8 rollout",
    "fp8_rollout": "fp8_rollout",
    "bf16_best": "BF16 with Liger and\nFlashAttention 3",
    "bf16_shared": "bf16_shared",
    "jet_fp8": "jet_fp8",
    "jet_fp8+jetrl.kv_cache=fp8": "jet_fp8 with an\nFP8 KV cache",
}
"""Row of the record -> its label, from the top."""
PHASES = {
    "gen_s": ("rollout", "#4477aa"),
    "old_log_prob_s": ("old log-probabilities", "#66ccee"),
    "update_actor_s": ("update", "#ee9944"),
    "update_weights_s": ("weight sync", "#aa3377"),
    "rest_s": ("rest", "#888888"),
}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "step_time", "font.family": "sans-serif", "font.size": 10}


def draw(record: dict, picture: Path) -> None:
    """Write one bar for each row of ``ROWS`` that the record has, its phases stacked and its total at the end."""
    runs = {run["row"]: run for run in record["runs"] if run["status"] == 0}
    rows = [row for row in ROWS if row in runs]
    job = runs[rows[0]]
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(8.4, 0.5 * len(rows) + 1.3), layout="constrained")
        ends = [0.0] * len(rows)
        for phase, (label, color) in PHASES.items():
            seconds = [runs[row][phase] for row in rows]
            bars = axes.barh(range(len(rows)), seconds, 0.66, ends, color=color, label=label)
            wide = [f"{value:.1f}" if value > 2 else "" for value in seconds]
            axes.bar_label(
                bars, wide, label_type="center", color="white" if phase == "gen_s" else "#222222", fontsize=9
            )
            ends = [end + value for end, value in zip(ends, seconds, strict=True)]
        for place, row in enumerate(rows):
            axes.text(ends[place] + 0.8, place, f"{runs[row]['step_s']:.1f} s", va="center", fontweight="bold")
        axes.set_yticks(range(len(rows)), [ROWS[row] for row in rows])
        axes.set(xlim=(0, 1.1 * max(ends)), xlabel=f"seconds; n = {job['steps'] - 1}, the step after a warm-up step")
        axes.invert_yaxis()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        model = job["model"].replace("qwen3_4b", "Qwen3-4B")
        job_words = f"{model}, {record['sequences']} responses of {job['response']:,} tokens, random weights"
        axes.set_title(f"One GRPO step in verl: {job_words}, one {record['gpu'].removeprefix('NVIDIA ')}", fontsize=10)
        figure.legend(loc="outside lower center", ncols=len(PHASES), frameon=False, fontsize=9)
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    draw(json.loads(options.record.read_text()), options.out)


if __name__ == "__main__":
    main()
