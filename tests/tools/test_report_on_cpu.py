# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The report: every figure on the page and beside it, nothing fetched from elsewhere, one run or several."""

import json
import re

import matplotlib.pyplot as plt
import pytest

from jetrl_verl.tools.report import (
    FIGURES,
    PALETTE,
    Figure,
    Run,
    _phase_seconds,
    accuracy_keys,
    bars,
    lines,
    load_run,
    rolling_mean,
    write_report,
)


def records(level: float = 0.4) -> list[tuple[int, dict]]:
    """Three steps as verl logs them, validation before and after."""
    accuracy = "val-core/jetrl/addition/acc/mean@1"
    step = {
        "rollout_corr/k3_kl": 1e-4,
        "training/rollout_probs_diff_max": 0.05,
        "actor/entropy": 0.1,
        "actor/pg_clipfrac": 0.01,
        "actor/pg_clipfrac_lower": 0.0,
        "response_length/mean": 43.0,
        "response_length/max": 48,
        "timing_s/gen": 1.0,
        "timing_s/update_actor": 2.0,
        "timing_s/agent_loop/generate_sequences/max": 0.9,
        "timing_s/step": 3.5,
        "timing_s/testing": 9.0,
        "actor/jetrl/sync_megabytes": 4.5,
    }
    steps = [(i, step | {"critic/score/mean": level + 0.1 * i}) for i in (1, 2, 3)]
    return [(0, {accuracy: level}), *steps[:2], (3, steps[2][1] | {accuracy: level + 0.35})]


def write_run(folder, lines: list[str], facts: dict | None = None):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts))
    return folder


def as_lines(run_records) -> list[str]:
    return [json.dumps({"step": step, "data": data}) for step, data in run_records]


def test_page_holds_every_figure_and_png_lies_beside_it(tmp_path):
    page = write_report([Run("jet_fp8", records())], tmp_path / "report.html").read_text()
    for figure in FIGURES:
        assert f"<figure id='{figure.name}'><svg" in page
        assert figure.title in page
        assert (tmp_path / f"report_{figure.name}.png").read_bytes().startswith(b"\x89PNG")
    assert "Not logged" not in page


def test_page_shows_accuracy_before_and_after(tmp_path):
    page = write_report([Run("jet_fp8", records())], tmp_path / "report.html").read_text()
    assert "40% → 75%" in page and "+35 points" in page
    assert "1.0e-04" in page and "3.5 s" in page


def validated(name="jet_fp8", first=0, group="", **sets: list[float]) -> Run:
    """A run that validated ``mean@N`` of sets, ``source_N=[values]``, at ``first``, ``first + 5``, ..."""
    records: dict[int, dict] = {}
    for key, values in sets.items():
        source, _, responses = key.rpartition("_")
        for i, value in enumerate(values):
            records.setdefault(first + 5 * i, {})[f"val-core/{source}/acc/mean@{responses}"] = value
    return Run(name, list(records.items()), group=group)


def accuracy_figure(path, *runs: Run) -> tuple[str, str, list[str]]:
    """Summary and figure of the held-out accuracy on the page of ``runs``, and the names in its legend."""
    page = write_report(runs, path / "report.html").read_text()
    figure = re.search("<figure id='accuracy'>(.*?)</figure>", page, re.DOTALL).group(1)
    legend = figure.partition('id="legend_1"')[2]
    return page[: page.index("<svg")], figure, re.findall(r"<text[^>]*>([^<]*)</text>", legend)


def test_every_validation_set_is_drawn_and_named(tmp_path):
    """The collapse of one beside another that is fine."""
    run = validated(gsm8k_1=[0.9, 0.2], MATH_1=[0.4, 0.41])
    summary, figure, legend = accuracy_figure(tmp_path, run)
    assert "<strong>90% → 20%</strong><span>held-out accuracy of gsm8k, before → after (-70 points)" in summary
    assert "<strong>40% → 41%</strong><span>held-out accuracy of MATH, before → after (+1 points)" in summary
    assert legend == ["MATH", "gsm8k"]
    assert all(f">{share}<" in figure for share in ("90%", "20%", "40%", "41%"))
    _, _, legend = accuracy_figure(tmp_path, run, validated("bf16", gsm8k_1=[0.9, 0.9]))
    assert legend == ["jet_fp8", "bf16", "MATH", "gsm8k"]


def test_a_single_validation_set_needs_no_name(tmp_path):
    summary, figure, legend = accuracy_figure(tmp_path, validated(gsm8k_1=[0.4, 0.75]))
    assert "<span>held-out accuracy, before → after (+35 points)" in summary
    assert legend == [] and "gsm8k" not in figure
    seeds = [validated(f"{group}{seed}", group=group, gsm8k_1=[0.4, 0.5]) for group in "ab" for seed in (1, 2)]
    assert accuracy_figure(tmp_path, *seeds)[2] == ["a", "b"]


def test_the_caption_says_how_many_responses_and_what_step_0_is(tmp_path):
    def caption(run: Run) -> str:
        return accuracy_figure(tmp_path, run)[1].partition("never trained on, ")[2]

    assert caption(validated(gsm8k_1=[0.4])).startswith("one response each; step 0 is before training.")
    assert caption(validated(gsm8k_32=[0.4])).startswith("32 responses each; step 0 is before training.")
    mixed = validated(gsm8k_1=[0.4], AIME_32=[0.1], first=5)
    assert caption(mixed).startswith("1 or 32 responses each.")
    assert accuracy_figure(tmp_path, mixed)[2] == ["AIME mean@32", "gsm8k mean@1"]


def test_only_step_0_is_called_before(tmp_path):
    """With trainer.val_before_train=False the first validation is a later one."""
    summary = accuracy_figure(tmp_path, validated(gsm8k_1=[0.5, 0.75], first=5))[0]
    assert "<strong>50% → 75%</strong><span>held-out accuracy, step 5 → 10 (+25 points)" in summary
    assert (
        "<strong>50%</strong><span>held-out accuracy, step 5<"
        in accuracy_figure(tmp_path, validated(gsm8k_1=[0.5], first=5))[0]
    )
    assert (
        "<strong>50%</strong><span>held-out accuracy, before<" in accuracy_figure(tmp_path, validated(gsm8k_1=[0.5]))[0]
    )


def test_page_needs_no_network(tmp_path):
    page = write_report([Run("jet_fp8", records())], tmp_path / "report.html").read_text()
    # What SVG names as its vocabulary is an identifier, not a request.
    sources = re.findall(r"""(?:src|href|url|@import)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert all(source.startswith("#") for source in sources)
    assert "<script" not in page and "<link" not in page


def test_text_of_figures_takes_the_colour_of_the_page(tmp_path):
    page = write_report([Run("jet_fp8", records())], tmp_path / "report.html").read_text()
    assert "currentColor" in page and "#33383f" not in page
    assert "prefers-color-scheme: dark" in page


def test_ids_of_figures_do_not_collide(tmp_path):
    page = write_report([Run("jet_fp8", records())], tmp_path / "report.html").read_text()
    clips = re.findall(r'<clipPath id="([^"]+)"', page)
    assert clips and len(clips) == len(set(clips))


def test_several_runs_share_every_figure(tmp_path):
    runs = [
        Run("bf16", records(0.3), {"steps": 3}),
        Run("jet_fp8", records(0.5), {"steps": 3, "policy": {"layers": 2}}),
    ]
    page = write_report(runs, tmp_path / "compare.html").read_text()
    assert page.count("<svg") == len(FIGURES)
    assert page.count("<h2>bf16</h2>") == page.count("<h2>jet_fp8</h2>") == 1
    assert "<th>policy.layers</th><td>–</td><td>2</td>" in page
    assert (tmp_path / "compare_timings.png").exists()


def drawn(runs, *metrics, **options) -> tuple[list[list[float]], list[str], bool]:
    """Values of the lines that are not faint, texts of the legend, and what the drawing function returned."""
    canvas, axes = plt.subplots()
    found = lines(*metrics, ylabel="share", **options)(axes, runs)
    legend = [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else []
    values = [list(line.get_ydata()) for line in axes.lines if line.get_alpha() is None]
    plt.close(canvas)
    return values, legend, found


def constant(name, *values, group="", key="x") -> Run:
    return Run(name, [(step, {key: value}) for step, value in enumerate(values)], group=group)


X, Y = ("x", "X"), ("y", "Y")


def test_a_log_axis_names_what_is_zero_throughout():
    zero, one = constant("zero", 0.0, 0.0), constant("one", 1.0, 1.0)
    both = Run("both", [(0, {"x": 0.0, "y": 0.0})])
    half = Run("half", [(0, {"x": 0.0, "y": 2.0})])
    assert drawn([one, both, half, constant("bare", 1.0, key="z")], X, Y, log=True)[1] == [
        "one", "both: 0", "half, X 0", "X", "Y"
    ]  # fmt: skip
    assert drawn([half], X, Y, log=True)[1] == ["Y", "X 0"]
    assert drawn([one, constant("below", -1.0)], X, log=True)[1] == ["one", "below, X not above 0"]
    assert drawn([zero, constant("b", 0.0)], X, log=True)[1:] == (["zero: 0", "b: 0"], True)
    assert drawn([zero], X, log=True)[1:] == (["X 0"], True) and drawn([zero], Y, log=True)[1:] == ([], False)
    assert drawn([zero], X) == ([[0.0, 0.0]], [], True)
    # Nothing but zeros: a line of them, on an axis that has a place for it; beside a value above 0 there is none.
    assert [0.0, 0.0] in drawn([zero], X, log=True)[0] and [0.0, 0.0] not in drawn([zero, one], X, log=True)[0]
    assert [-1.0] not in drawn([constant("below", -1.0)], X, log=True)[0]


def test_a_mismatch_of_zero_is_logged(tmp_path):
    zero = {"rollout_corr/k3_kl": 0.0, "training/rollout_probs_diff_max": 0.0}
    run = Run("exact", [(step, data | zero if step else data) for step, data in records()])
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "Not logged" not in page and "k3 KL (nat) 0, max |Δp| 0" in page


def test_zeros_count_in_means_of_a_log_axis():
    """Seeds 0 and 1 have the mean 0.5; one step of 1 among ten of 0 is 0.1 in their rolling mean."""
    seeds = [constant("a1", 0.0, group="a"), constant("a2", 1.0, group="a"), constant("b", 1.0)]
    assert drawn(seeds, X, log=True)[0] == [[0.5], [1.0]]
    rare = [1.0 * (step % 10 == 0) for step in range(60)]
    values = drawn([constant("a", *rare), constant("b", *rare)], X, log=True)[0][0]
    assert values[10:50] == pytest.approx([0.1] * 40)


def test_long_runs_of_several_groups_are_smoothed_and_others_are_not():
    assert rolling_mean([1.0, 2.0, 6.0, 7.0], 3) == [1.5, 3.0, 5.0, 6.5]
    assert rolling_mean([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0] and rolling_mean([3.0, 4.0], 1) == [3.0, 4.0]
    ramp = [float(step) for step in range(40)]
    long, short = constant("long", *ramp), constant("short", *ramp[:6])
    assert drawn([long], X)[0] == [ramp]
    assert drawn([long, short], X)[0] == [rolling_mean(ramp, 10), ramp[:6]]


def test_a_legend_says_which_group_and_which_metric_are_drawn():
    one, bare = constant("one", 1.0, 1.0), constant("bare", 1.0, key="z")
    assert drawn([one, bare], X)[1] == ["one"]
    assert drawn([one, bare], X, Y)[1] == ["one", "X"]
    assert drawn([one], X, Y)[1] == []


def test_bars_are_means_over_steps_with_a_dot_for_each_seed(tmp_path):
    def run(name, group, *values):
        return Run(name, [(step, {"share": value}) for step, value in enumerate(values)], group=group)

    runs = [
        run("a1", "a", 1.0, 3.0),
        run("a2", "a", 4.0),
        Run("b1", [(1, {"other": 1.0})], group="b"),
        run("c1", "c", 0.0),
    ]
    with plt.rc_context():
        canvas, axes = plt.subplots()
        assert bars(("share", "a share"), xlabel="share")(axes, runs)
        assert [patch.get_width() for patch in axes.patches] == [3.0, 0.0]
        assert [list(line.get_xdata()) for line in axes.lines] == [[2.0, 4.0], [0.0]]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "c"]
        assert not bars(("absent", ""), xlabel="")(axes, runs)
        plt.close(canvas)


def test_a_dozen_groups_have_a_colour_each(tmp_path):
    assert len(PALETTE) == len(set(PALETTE)) >= 12
    runs = [Run(str(i), [(1, {"x": 1.0 + i}), (2, {"x": 2.0})]) for i in range(12)]
    page = write_report(runs, tmp_path / "a.html", figures=[Figure("x", "X", "x", lines(("x", "x"), ylabel="x"))])
    assert all(colour in page.read_text() for colour in PALETTE)


def test_absent_metrics_are_named(tmp_path):
    run = Run("bare", [(1, {"critic/score/mean": 0.5}), (2, {"critic/score/mean": None})])
    page = write_report([run], tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "Not logged by these runs: held-out accuracy" in page
    assert not (tmp_path / "report_timings.png").exists()


def test_facts_and_own_metrics_are_in_the_table_and_escaped(tmp_path):
    run = Run("jet_fp8", records(), {"backends": {"gemm": "<torch>"}, "command": "a && b"})
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "<th>backends.gemm</th><td>&lt;torch&gt;</td>" in page
    assert "a &amp;&amp; b" in page
    assert "<th>jetrl/sync_megabytes, mean</th><td>4.5</td>" in page


def test_phases_add_up_to_the_step():
    seconds = _phase_seconds(records()[1][1])
    assert seconds == {"gen": 1.0, "update_actor": 2.0, "other": 0.5}


def test_a_run_is_read_from_its_folder(tmp_path):
    folder = write_run(tmp_path / "run", as_lines(records()), {"precision": "jet_fp8"})
    run = load_run(folder)
    assert run.name == "jet_fp8" and run.records == records()
    assert run.series(accuracy_keys([run])["jetrl/addition"]) == ([0, 3], [0.4, 0.75])


def test_a_cut_off_last_line_is_dropped(tmp_path):
    folder = write_run(tmp_path / "run", [*as_lines(records()), '{"step": 4, "da'])
    assert len(load_run(folder, "x").records) == 4


@pytest.mark.parametrize(
    "lines,message",
    [
        (['{"step": 1', '{"step": 2, "data": {}}'], "line 1 of .* is not a metrics record"),
        (['{"step": 1, "data": 3}', '{"step": 2, "data": {}}'], "line 1 of .* is not a metrics record"),
        ([], "is empty"),
    ],
)
def test_damaged_metrics_are_one_sentence(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        load_run(write_run(tmp_path / "run", lines))


def test_a_folder_without_metrics_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="logged nothing"):
        load_run(tmp_path)


def test_no_run_or_equal_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ValueError, match="same name"):
        write_report([Run("a", records()), Run("a", records())], tmp_path / "report.html")
