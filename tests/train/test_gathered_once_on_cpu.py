# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl.gathered=batch`` in verl's engine under FSDP2 on two gloo processes: every bit is that of ``pass``, and a
decoder layer is gathered and quantized once a batch."""

from functools import partial
from typing import Any

import engines
import pytest
import torch
from engines import build, gathers_counted, quantized, sent
from streams import same
from tiny_models import tiny_model, with_preferences
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from two_processes import in_two_processes

from jetrl_verl.train.gathered import gathered_once

pytestmark = pytest.mark.usefixtures("cpu_platform")
LENGTHS = (24, 3, 17, 2)
outputs, train = partial(engines.outputs, lengths=LENGTHS), partial(engines.train, lengths=LENGTHS)
MICRO_BATCHES, STEPS = 2, 3  # of engines.py's batch; of the optimizer
# verl's YAML, and so this engine, reduces gradients in each micro-batch.
JOBS: dict[str, dict[str, Any]] = {
    "jet_fp8": {},
    "shared": dict(operations="shared"),
    "not checkpointed": dict(operations="shared", checkpointing=False),
    "BF16 backward": dict(backward="bf16"),
    "fp8_rollout": dict(precision="fp8_rollout", train="bf16"),
    "mixture": dict(operations="shared"),
    "not reduced": dict(sharding=dict(use_no_sync_for_gradient_accumulation=True)),
    "HSDP": dict(fsdp_size=1),
}


def is_sharded(engine) -> bool:
    has_qdata = any(layer.holds_qdata for layer in quantized(engine.module))
    return all(isinstance(parameter, DTensor) for parameter in engine.module.parameters()) and not has_qdata


def of_decoder_layers(engine, counts: dict[int, int]) -> list[int]:
    """Gathers of each decoder layer's group."""
    decoder = getattr(engine.module, engine.module.base_model_prefix, engine.module)
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in decoder.layers]
    return [counts.pop(id(group)) for group in groups]


@pytest.mark.parametrize("job", JOBS)
@in_two_processes
def test_weights_gathered_once_give_the_bits_of_those_gathered_each_pass(rank, job, folders):
    folder, options = folders["qwen3_moe" if job == "mixture" else "qwen3"], JOBS[job]
    runs = {}
    for gathered in ("pass", "batch"):
        engine = build(folder, gathered=gathered, **options)
        layers = quantized(engine.module)
        with gathers_counted() as counts:
            before = outputs(engine, rank)
            gathers = [of_decoder_layers(engine, counts)]
            quantizations = [max((layer.quantizations for layer in layers), default=0)]
            assert is_sharded(engine)
            norms = []
            for _ in range(STEPS):
                norms.append(train(engine, rank))
                gathers.append(of_decoder_layers(engine, counts))
                quantizations.append(max((layer.quantizations for layer in layers), default=0))
                assert is_sharded(engine)
        runs[gathered] = [before, torch.tensor(norms), outputs(engine, rank), sent(engine)]

        once = gathered == "batch"
        forward = 1 if once else MICRO_BATCHES
        both = 1 if once else 2 * MICRO_BATCHES
        assert gathers == [[forward] * 2, *[[both] * 2] * STEPS], (gathered, gathers)
        if layers:
            assert quantizations == [forward + step * both for step in range(STEPS + 1)], (gathered, quantizations)
    *first, weights = runs["pass"]
    *others, other_weights = runs["batch"]
    assert all(torch.equal(a, b) for a, b in zip(first, others, strict=True))
    assert not torch.equal(first[0], first[2]), "nothing was learned"
    assert same(weights, other_weights)


@in_two_processes
def test_references_and_critics_gather_once_too(rank, folders):
    """Except a critic under FSDP1, verl's default strategy."""
    folder = folders["qwen3"]
    for role, name, ways in (("ref", "log_probs", ("fsdp2",)), ("critic", "values", ("fsdp2", "fsdp"))):
        for strategy in ways:
            runs = []
            for gathered in ("pass", "batch"):
                torch.manual_seed(0)  # for the critic's head, which is not in the folder
                engine = build(folder, role=role, strategy=strategy, gathered=gathered, ref="fp8", critic="fp8")
                with gathers_counted() as counts:
                    runs.append(outputs(engine, rank, name))
                if strategy == "fsdp2":
                    expected = 1 if gathered == "batch" else MICRO_BATCHES
                    assert of_decoder_layers(engine, counts) == [expected] * 2, (role, gathered)
                    assert is_sharded(engine)
            assert torch.equal(*runs), (role, strategy)


@pytest.mark.parametrize("after_forward", [True, False])
@in_two_processes
def test_a_batch_that_fails_leaves_nothing_gathered(rank, folders, after_forward):
    """In the second micro-batch, in the last layer's forward or backward."""
    folder = folders["qwen3"]
    engine = build(folder, gathered="batch", sharding=dict(reshard_after_forward=after_forward))
    for what in ("register_forward_pre_hook", "register_full_backward_pre_hook"):
        calls = []

        def second_fails(*_):
            calls.append(1)  # noqa: B023  (called in this iteration alone)
            if len(calls) == 2:  # noqa: B023
                raise FloatingPointError("as a check of values may")

        hook = getattr(engine.module.model.layers[-1], what)(second_fails)
        with pytest.raises(FloatingPointError):
            if "backward" in what:
                train(engine, rank)
            else:
                outputs(engine, rank)
        hook.remove()
        assert is_sharded(engine), what


@in_two_processes
def test_after_a_batch_verls_own_setting_decides_again(rank, folders):
    """verl's ``fsdp_config.reshard_after_forward`` decides again after a batch."""
    folder = folders["qwen3"]
    engine = build(folder)
    units = [module for module in engine.module.modules() if isinstance(module, FSDPModule)]
    assert len(units) > 2

    def flags():
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
        return [(group._reshard_after_forward, group.reshard_after_backward) for group in groups]

    outputs(engine, rank)
    for after_forward in (True, False):
        engine.module.set_reshard_after_forward(after_forward)
        before = flags()
        with gathered_once(engine.module, after_forward):
            assert flags() == [(False, False)] * len(units)
        assert flags() == before


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    paths = {name: tmp_path_factory.mktemp(name) for name in ("qwen3", "qwen3_moe")}
    for name, path in paths.items():
        with_preferences(tiny_model(name)).save_pretrained(path)
    return {name: str(path) for name, path in paths.items()}
