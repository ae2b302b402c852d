# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's engine with packed sequences and without flash-attn, FSDP2 on two gloo processes: every precision and role,
and Ulysses."""

from functools import partial
from typing import Any

import engines
import pytest
import torch
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from engines import batch, build, sent, train
from hydra import compose, initialize_config_module
from hydra_files import parsed_once  # noqa: F401  (for every test of this file)
from omegaconf import OmegaConf
from tiny_models import tiny_model, with_preferences
from two_processes import WORLD, in_two_processes

from jetrl_verl.config.options import PRECISIONS

pytestmark = pytest.mark.usefixtures("cpu_platform")
LENGTHS = (24, 3, 17, 2)
outputs = partial(engines.outputs, lengths=LENGTHS)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """Precision -> fields of ``JetConfig`` in its group; without precisions that differ in the loss alone."""
    rows: dict[str, dict[str, Any]] = {"bf16": {}}
    with initialize_config_module("verl.trainer.config", version_base=None):
        for precision in PRECISIONS[1:]:
            fields = OmegaConf.to_container(compose("ppo_trainer", overrides=[f"precision={precision}"]).jetrl)
            del fields["precision"], fields["job"]
            if fields not in rows.values():
                rows[precision] = fields
    return rows


@in_two_processes
def test_every_precision_takes_packed_steps(rank, folder, rows):
    assert set(PRECISIONS) - rows.keys() == {"fp8_rollout_tis", "int8_rollout_tis"}
    leaked = None
    for precision, options in rows.items():
        engine = build(folder, precision=precision, **options)
        packed, padded = outputs(engine, rank), outputs(engine, rank, packed=False)
        assert packed.shape == (sum(LENGTHS) - len(LENGTHS),)
        if options.get("operations") == "shared":
            assert torch.equal(packed, padded), precision
        if precision == "bf16":
            # Log-probabilities of sequences that attend to the ones before them.
            data = batch(rank, LENGTHS)
            for part in data["position_ids"].unbind()[1::2]:
                part += 24
            with engine.eval_mode():
                one = engine.infer_batch(data)["model_output"]["log_probs"]
            leaked = (torch.cat([row[:-1] for row in one.float().unbind()]) - packed).abs().max()
        assert (packed - padded).abs().max() < 0.05 < 0.5 * leaked, precision
        norms = [train(engine, rank, lengths=LENGTHS) for _ in range(2)]
        assert all(0 < norm < float("inf") for norm in norms), precision
        assert not torch.equal(outputs(engine, rank), packed), f"{precision}: nothing was learned"
        if precision != "bf16":
            assert sent(engine)


@in_two_processes
def test_every_role_takes_packed_batches(rank, folder):
    for options in (dict(precision="bf16"), dict(ref="fp8", critic="fp8")):
        reference = build(folder, role="ref", **options)
        assert (outputs(reference, rank) - outputs(reference, rank, packed=False)).abs().max() < 0.05
        critic = build(folder, role="critic", **options)
        assert critic.module.config._attn_implementation == "jetrl_varlen"
        values = outputs(critic, rank, "values"), outputs(critic, rank, "values", packed=False)
        torch.testing.assert_close(*values, rtol=0.02, atol=0.02)


@in_two_processes
def test_ranks_that_share_tokens_give_the_outputs_of_one(rank, folder):
    alone, shared = build(folder), build(folder, ulysses=WORLD)
    # The same sequences on both ranks; Ulysses splits them.
    assert (outputs(alone, 5) - outputs(shared, 5)).abs().max() < 0.05
    norms = [train(engine, 5, lengths=LENGTHS) for engine in (alone, shared)]
    assert rank or norms[1] == pytest.approx(norms[0], rel=0.02)
    assert (outputs(alone, 5) - outputs(shared, 5)).abs().max() < 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    with_preferences(tiny_model("qwen3")).save_pretrained(path)
    return str(path)
