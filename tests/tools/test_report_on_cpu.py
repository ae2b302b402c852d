# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: the report, its page that needs no network, the line of a step, errors of a failed run."""

import json
import re
import traceback

import matplotlib.pyplot as plt
import pytest
from omegaconf import OmegaConf

from jetrl_verl.checkpoint.validation import DamagedCheckpointError
from jetrl_verl.config import composition
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.inputs import UserError
from jetrl_verl.models.plan import UnsupportedLayer
from jetrl_verl.sync.statement import ContractViolation
from jetrl_verl.tools.progress import describe, last_errors
from jetrl_verl.tools.report import PANELS, Run, accuracy_keys, draw, load_run, write_report

ACCURACY = "val-core/jetrl/addition/acc/mean@1"
STEP = {
    "rollout_corr/k3_kl": 1e-4,
    "actor/entropy": 0.1,
    "actor/pg_clipfrac": 0.01,
    "response_length/mean": 43.0,
    "timing_s/agent_loop/generate_sequences/max": 0.9,
    "timing_s/step": 3.5,
    "actor/jetrl/sync_megabytes": 4.5,
}


def records(level: float = 0.4, **others: float) -> list[tuple[int, dict]]:
    """Three steps as verl logs them, validation before and after."""
    steps = [(i, STEP | others | {"critic/score/mean": level + 0.1 * i}) for i in (1, 2, 3)]
    return [(0, {ACCURACY: level}), *steps[:2], (3, steps[2][1] | {ACCURACY: level + 0.35})]


def write_metrics(path, records: list[tuple[int, dict]], rest: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in records) + rest)


def mismatch_lines(runs, extra=()) -> tuple[dict[str, list[float]], plt.Axes]:
    """Label -> values of the lines in the panel of the mismatch, and its axes."""
    figure, _ = draw(runs, extra, ["mismatch"])
    axes = figure.axes[0]
    plt.close(figure)
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines if line.get_alpha() is None}, axes


def test_a_run_is_read_from_its_folder(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", records(), '{"step": 4, "da')
    (tmp_path / "run.json").write_text('{"precision": "jet_fp8"}')
    run = load_run(tmp_path)
    assert run.name == "jet_fp8" and run.records == records()
    values = Run("", [(1, {"x": 1.0}), (2, {"x": None}), (3, {"x": float("inf")}), (4, {"x": 3})])
    assert values.series("x") == ([1, 4], [1.0, 3.0]) and values.mean("x") == 2.0 and values.mean("y") is None
    assert run.series(accuracy_keys([run])["jetrl/addition"]) == ([0, 3], [0.4, 0.75])


def test_a_resumed_run_is_read_from_all_attempts(tmp_path):
    write_metrics(tmp_path / "metrics-00.jsonl", [(1, {"a": 1.0}), (2, {"a": 2.0})], '{"step": 3')
    write_metrics(tmp_path / "metrics.jsonl", [(1, {"val": 9.0}), (2, {"a": 5.0})])
    assert load_run(tmp_path).records == [(1, {"a": 1.0, "val": 9.0}), (2, {"a": 5.0})]


@pytest.mark.parametrize("line", ['{"step": 1', '{"step": 1, "data": 3}'])
def test_damaged_or_missing_metrics_are_one_sentence(tmp_path, line):
    with pytest.raises(UserError, match="logged nothing"):
        load_run(tmp_path)
    write_metrics(tmp_path / "metrics.jsonl", [], f'{line}\n{{"step": 2, "data": {{}}}}')
    with pytest.raises(UserError, match="line 1 of .* is not a metrics record; delete the folder"):
        load_run(tmp_path)


def test_validation_sets_are_named_with_the_responses_where_they_differ():
    one, many = {"val-core/openai/gsm8k/acc/mean@1": 0.4}, {"val-core/AIME/acc/mean@32": 0.1}
    assert list(accuracy_keys([Run("", [(0, one)])])) == ["openai/gsm8k"]
    assert list(accuracy_keys([Run("", [(0, one | many)])])) == ["AIME mean@32", "openai/gsm8k mean@1"]


def test_a_mismatch_of_zero_is_a_visible_line_next_to_others():
    exact = Run("jet_fp8_exact", records(**{"rollout_corr/k3_kl": 0.0}))
    for extra in ((), [Run("fp8_rollout", [(i, {"rollout_corr/k3_kl": v}) for i, v in enumerate((2e-4, 1e-4, 3e-4))])]):
        lines, axes = mismatch_lines([exact], extra)
        assert lines["jet_fp8_exact: exactly 0"] == [0.0] * 3
        assert axes.get_ylim()[0] < 0 and {text.get_text() for text in axes.get_legend().get_texts()} == set(lines)
    assert lines["fp8_rollout"] == [2e-4, 1e-4, 3e-4] and axes.get_ylim()[1] > 3e-4
    # The zero line is below the smallest other value by at least a tenth of the axis.
    zero, smallest = axes.transData.transform([(1, 0.0), (1, 1e-4)])[:, 1]
    assert smallest - zero > 0.1 * axes.bbox.height


def test_seeds_of_a_group_are_drawn_as_their_mean():
    seeds = [Run(f"a{seed}", [(1, {"rollout_corr/k3_kl": float(seed)})], group="a") for seed in (1, 3)]
    assert mismatch_lines([*seeds, Run("b", records())])[0] == {"a": [2.0], "b": [1e-4] * 3}


def test_panels_without_data_are_named():
    figure, missing = draw([Run("bare", [(1, {"critic/score/mean": 0.5})])])
    assert missing == [title for title, *_ in list(PANELS.values())[1:]]
    assert [axes.get_title(loc="left") for axes in figure.axes if axes.axison] == ["Reward"]
    plt.close(figure)


def test_the_page_has_picture_and_numbers_of_every_run_and_needs_no_network(tmp_path):
    facts = {"policy": {"layers": 2}, "command": "a && <b>"}
    runs = [Run("bf16", records(0.3)), Run("jet_fp8", records(0.5), facts)]
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("<svg") == 1 and "Not logged" not in page
    for name, first, second in [
        ("held-out accuracy, jetrl/addition", "0.300 (step 0) → 0.650 (step 3)", "0.500 (step 0) → 0.850 (step 3)"),
        ("reward", "0.400 (step 1) → 0.600 (step 3)", "0.600 (step 1) → 0.800 (step 3)"),
        ("rollout_corr/k3_kl, mean", "0.0001", "0.0001"),
        ("actor/jetrl/sync_megabytes, mean", "4.5", "4.5"),
        ("timing_s/step, mean", "3.5", "3.5"),
        ("policy", "–", "{&quot;layers&quot;: 2}"),
        ("command", "–", "a &amp;&amp; &lt;b&gt;"),
    ]:
        assert f"<tr><th>{name}</th><td>{first}</td><td>{second}</td></tr>" in page
    sources = re.findall(r"""(?:src|href|url|@import)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert all(source.startswith("#") for source in sources) and "<script" not in page and "<link" not in page


NOISE = "WARNING Using None for EOS token id\njetrl_verl.train.engine: 14 linear layers in FP8\n"
ERRORS = [ContractViolation, DamagedCheckpointError, UnsupportedConfiguration, UnsupportedLayer, ValueError]


@pytest.mark.parametrize("kind", ERRORS)
def test_exceptions_and_refusals_are_recognized(tmp_path, kind):
    (line,) = traceback.format_exception_only(kind("layer 3 differs"))
    refusal = "jetrl_verl: precision=fp4 is not a choice."
    log = tmp_path / "run.log"
    log.write_text(f"{NOISE}\x1b[36m(WorkerDict pid=7)\x1b[0m {line}noise after the error\n{refusal}\nnoise\n")
    assert last_errors(log) == [line.rstrip(), refusal]


def test_forwarded_exceptions_and_startup_notes_are_not_errors(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    composition._say.cache_clear()
    node = {"precision": "jet_fp8", "train": "fp8", "rollout": "fp8", "operations": "auto"}
    monkeypatch.setattr(composition, "refusals", lambda *_: ())  # the node alone is no job
    composition.resolve(OmegaConf.create({"jetrl": node}))
    note = capsys.readouterr().err
    passed = "ray.exceptions.RayTaskError: \x1b[36mray::vLLMHttpServer.collective_rpc()\x1b[39m (pid=7, repr=<...>)\n"
    died = "ray.exceptions.RayTaskError(ActorDiedError): ray::TaskRunnerV1.run() (pid=7, repr=<...>)\n"
    log = tmp_path / "run.log"
    log.write_text(f"{note}{passed}{died}Exception: Call to collective_rpc method failed: cancelled\n")
    assert note.startswith("jetrl_verl: ")
    assert last_errors(log) == ["Exception: Call to collective_rpc method failed: cancelled"]


def test_a_log_without_an_exception_shows_its_last_lines(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(NOISE)
    assert last_errors(log, tail=2) == NOISE.splitlines()
    assert last_errors(tmp_path / "none") == []


def test_a_step_shows_the_metrics_it_has():
    accuracies = {"val-core/openai/gsm8k/acc/mean@1": 0.9, "val-core/MATH-500/acc/mean@1": 0.4}
    assert describe(accuracies) == "accuracy of MATH-500 40.0%  accuracy of openai/gsm8k 90.0%"
    assert describe({"rollout_corr/k3_kl": 0.0, "val-core/MATH-500/acc/mean@1": None}) == "k3_kl 0.0e+00"
