# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff`` of a hybrid: equal under jet_fp8_exact, and a planted difference is named by its operation."""

import json

import pytest
from engine_here import run_here
from rich.console import Console
from tiny_models import save_policy

from jetrl_verl import kernels
from jetrl_verl.inputs import UserError
from jetrl_verl.tools.diff import run
from jetrl_verl.tools.diff.run import DiffOptions, run_diff

RESPONSE = 8

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def compare(tmp_path_factory, cpu_platform):
    """Callable that runs the command and returns its report, on one recording of an engine in this process."""
    folder = tmp_path_factory.mktemp("hybrid")
    policy, prompts, recordings = save_policy(folder / "policy", "qwen3_5"), folder / "prompts.jsonl", []
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": [3 + i] * (9 + 7 * i)}) for i in range(2)))

    def engine(request, *args):
        if not recordings:
            answers = [[5 + i, 7, 9, 4, 8, 6, 5, 10] for i in range(2)]
            arguments = dict(max_num_seqs=2, enable_prefix_caching=False, block_size=64)
            recordings.append(run_here(request, answers, **arguments))
        return recordings[0]

    def compared(precision: str = "jet_fp8_exact") -> dict:
        options = DiffOptions(policy, (precision,), prompts, 2, RESPONSE, 1.0, folder / "out", ())
        run_diff(options, Console(width=120))
        return json.loads((folder / "out" / "report.json").read_text())["precisions"][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_engine", engine)
        yield compared


def test_equal_in_every_operation(compare):
    report = compare()
    assert report["equal"] and report["first_difference"] is None
    # 16 operations in each of two linear layers, 18 in the full one, no residual sum at the first.
    assert len(report["operations"]) == 2 * 16 + 18 - 1 + 5


@pytest.mark.parametrize(("function", "named"), [("causal_conv1d", "convolution"), ("gated_delta_rule", "delta_rule")])
def test_a_difference_of_the_trainer_is_named(compare, monkeypatch, function, named):
    stock = getattr(kernels, function)
    monkeypatch.setattr(kernels, function, lambda *args: stock(*args) * 1.0078125)
    report = compare()
    assert (report["first_difference"]["layer"], report["first_difference"]["operation"]) == (0, named)
    assert report["all_corrected"]["differing"] == 0


def test_stock_delta_nets_are_refused(compare):
    message = (
        "precision=fp8_rollout with the model .* is not supported with jetrl diff of stock operations: a delta net"
    )
    with pytest.raises(UserError, match=message):
        compare("fp8_rollout")
