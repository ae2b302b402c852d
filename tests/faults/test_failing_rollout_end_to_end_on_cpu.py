# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Real runs of verl whose rollout worker fails as it loads its first weights: they end at once, with its error."""

import pytest
from fault_injector import RAISED, Fault
from run_faults import Chain

from jetrl_verl.config.support.table import refusal

SECONDS, SECONDS_OF_A_REFUSAL = 30.0, 10.0
"""From the failure to the end of the driver."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("precision", "kind", "error"),
    [
        ("bf16", "raise", RAISED),
        pytest.param("bf16", "kill", "EngineDeadError", marks=pytest.mark.slow),
        pytest.param("jet_fp8", "raise", RAISED, marks=pytest.mark.slow),
        pytest.param("jet_fp8", "kill", "EngineDeadError", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_fails_in_the_first_sync_ends_the_run(precision, kind, error, tmp_path):
    fault = Fault(kind, "rollout", "sync", 0, str(tmp_path))
    outcome = Chain(tmp_path / "runs", precision, 60.0, "cpu", 1).run(kind, 1, fault)
    assert outcome.status == 1 and outcome.seconds < SECONDS and not outcome.left, outcome
    # Verl's own shared memory, still in use, may hide the worker's error from the trainer.
    (log,) = (tmp_path / "runs").rglob("run.log")
    assert outcome.errors and error in log.read_text(), outcome.errors


@pytest.mark.timeout(900)
def test_what_a_worker_refuses_as_it_starts_is_the_last_line(tmp_path):
    fault = Fault("refuse", "rollout", "sync", 0, str(tmp_path))
    outcome = Chain(tmp_path / "runs", "jet_fp8_exact", 60.0, "cpu", 1).run("refusal", 1, fault)
    (log,) = (tmp_path / "runs").rglob("run.log")
    assert outcome.status == 1 and outcome.seconds < SECONDS_OF_A_REFUSAL and not outcome.left, outcome
    assert log.read_text().rstrip().splitlines()[-1] == f"jetrl_verl: {refusal('operation_replaced_in_vllm')}"
