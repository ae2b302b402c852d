# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's engine under BF16 training, FSDP2 on two gloo processes: INT8, FP8 and BF16 rollouts, and invariant
scaling."""

import logging
from functools import partial
from unittest import mock

import pytest
import torch
from engines import build
from safetensors.torch import load_file
from streams import same
from test_engine_under_fsdp2_on_cpu import batch, sent, train
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM
from two_processes import in_two_processes

from jetrl_verl.algorithms.invariant_scaling import fold_missing, folded_in, unfolded
from jetrl_verl.checkpoint.export import ExportOptions, export
from jetrl_verl.checkpoint.validation import KEPT_SCALES
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.formats.format import SCALE_SUFFIX
from jetrl_verl.models import family
from jetrl_verl.models.plan import plan_linears, plan_of
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.reference import quantize_int8
from jetrl_verl.train.shared_operations import ATTENTION

pytestmark = pytest.mark.usefixtures("cpu_platform")


def masters(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in engine.module.state_dict().items()}


@in_two_processes
def test_int8_weights_are_quantized_again_at_every_sync(rank, folder):
    engine = build(folder, precision="int8_rollout", train="bf16", rollout="int8")
    for step in range(2):
        stream, weights = sent(engine), masters(engine)
        assert len(stream.quantized) == 14
        for name in stream.quantized:
            expected = quantize_int8(weights[name].to(torch.bfloat16))
            assert torch.equal(stream[name], expected.qdata), (name, step)
            assert torch.equal(stream[name + SCALE_SUFFIX], expected.scales), (name, step)
        train(engine, rank)


@in_two_processes
def test_bf16_shared_sends_bf16_and_measures_no_quantization(rank, folder):
    from verl.workers.utils.losses import sft_loss

    options = dict(precision="bf16_shared", train="bf16", rollout="bf16", operations="shared")
    engine = build(folder, **options)
    assert not any(isinstance(module, JetLinear) for module in engine.module.modules())
    assert engine.module.config._attn_implementation == ATTENTION
    stream, weights = sent(engine), masters(engine)
    manifest = stream.manifest
    assert not stream.quantized and manifest.probe is None and manifest.operations["attention"]
    assert set(stream.plain) == set(weights)
    assert all(torch.equal(stream[name], weights[name].to(torch.bfloat16)) for name in weights)
    with engine.train_mode():
        metrics = engine.train_batch(batch(rank), partial(sft_loss, None))["metrics"]
    assert metrics["grad_norm"] > 0
    assert {name for name in metrics if "jetrl/" in name} == {
        "jetrl/sync_megabytes",
        "jetrl/sync_stock_megabytes",
        "jetrl/sync_seconds",
    }
    again = sent(engine)
    assert all(not torch.equal(again[name], stream[name]) for name in weights if "proj.weight" in name)

    kinds = {
        type(m) for name, m in build(folder, "ref", ref="fp8", **options).module.named_modules() if "_proj" in name
    }
    assert kinds == {JetLinear}, "a reference policy's linear layers have an option of their own"


@in_two_processes
def test_int8_scales_of_the_first_sync_are_kept_and_checkpointed(rank, folder, tmp_path):
    options = dict(precision="int8_rollout", train="bf16", rollout="int8", int8_scales="first")
    engine = build(folder, **options)
    first = sent(engine)
    names = first.quantized
    before = {name: first[name].clone() for name in names}
    scales = {name: first[name + SCALE_SUFFIX].clone() for name in names}
    for _ in range(2):
        train(engine, rank)
    stream, weights = sent(engine), masters(engine)
    moved = 0
    for name in names:
        bf16 = weights[name].to(torch.bfloat16)
        assert torch.equal(stream[name + SCALE_SUFFIX], scales[name]), name
        assert torch.equal(stream[name], quantize_int8(bf16, scales[name]).qdata), name
        moved += int((stream[name] != before[name]).sum()) + int((quantize_int8(bf16).scales != scales[name]).sum())
    assert moved > 0, "qdata change, and new scales would"

    # Each rank has its own disk.
    checkpoint = tmp_path / str(rank) / "global_step_2" / "actor"
    checkpoint.mkdir(parents=True)
    (of_other_ranks := checkpoint / "model_world_size_7_rank_0.pt").touch()
    engine.save_checkpoint(str(checkpoint), global_step=2)
    assert (checkpoint / KEPT_SCALES).exists() == (rank == 0) and not of_other_ranks.exists()
    resumed = build(folder, **options)

    def load(warnings: int) -> dict[str, torch.Tensor]:
        with mock.patch.object(logging.getLogger("jetrl_verl.train.features"), "warning") as warning:
            resumed.load_checkpoint(str(checkpoint), del_local_after_load=False)
        lines = [call.args[0] % call.args[1:] for call in warning.call_args_list]
        assert len(lines) == warnings and all(f"{checkpoint} has no scales of weights" in line for line in lines)
        return sent(resumed)

    loaded = load(warnings=0)
    assert same(loaded, stream), "qdata, scales and the rest"
    (checkpoint / KEPT_SCALES).unlink(missing_ok=True)
    loaded = load(warnings=int(rank == 0))
    assert all(torch.equal(loaded[n], quantize_int8(weights[n].to(torch.bfloat16)).qdata) for n in names), (
        "quantized again"
    )


@in_two_processes
def test_a_later_stage_has_the_factor_once(rank, folder, scaled_folder):
    options = dict(precision="qurl_fp8", train="bf16")
    expected = masters(build(folder, invariant_scaling=1.5, **options))
    engine = build(scaled_folder, invariant_scaling=1.5, **options)
    assert folded_in(engine.module.config) == 1.5
    assert all(torch.equal(tensor, expected[name]) for name, tensor in masters(engine).items())
    for s in (3.0, 1.0):
        engine = build(scaled_folder, invariant_scaling=s, **options)
        assert folded_in(engine.module.config) == s
        unscaled = dict(unfolded(expected.items(), 1.5 / s, family(engine.module.config)))
        for name, tensor in masters(engine).items():
            torch.testing.assert_close(tensor, unscaled[name], rtol=3e-7, atol=0)


@in_two_processes
def test_scaling_changes_the_actor_alone_and_not_its_policy(rank, folder):
    options = dict(precision="qurl_fp8", train="bf16", invariant_scaling=1.5)
    plain, scaled = build(folder, precision="fp8_rollout", train="bf16"), build(folder, **options)
    before, after = masters(plain), masters(scaled)
    plans = plan_linears(plain.model_config.hf_config)
    for name, tensor in before.items():
        if "layernorm" in name:
            assert torch.equal(after[name], tensor * 1.5), name
        elif (plan := plan_of(name, plans)) is None or "bias" in name or "o_proj" in name or "down_proj" in name:
            assert torch.equal(after[name], tensor), (name, plan)
        else:
            assert torch.equal(after[name], tensor / 1.5), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in masters(build(folder, "ref", **options)).items())

    def log_probs(engine) -> torch.Tensor:
        with engine.eval_mode():
            return engine.infer_batch(batch(rank))["model_output"]["log_probs"].values()

    assert (log_probs(scaled) - log_probs(plain)).abs().max() < 0.05, "more than BF16 rounding"


@pytest.mark.parametrize("start", ["folder", "scaled_folder"])
@in_two_processes
def test_a_scaled_checkpoint_records_its_factor(rank, start, folder, scaled_folder, tmp_path):
    """Exported BF16 weights are the masters without the factor; another factor is refused."""
    folder = {"folder": folder, "scaled_folder": scaled_folder}[start]
    options = dict(precision="qurl_fp8", train="bf16", invariant_scaling=1.5)
    engine = build(folder, **options)
    train(engine, rank)
    checkpoint = tmp_path / "global_step_1" / "actor"
    engine.save_checkpoint(str(checkpoint), global_step=1)
    stream, weights = sent(engine), masters(engine)
    if rank == 0:
        export(checkpoint, tmp_path / "out", ExportOptions())
        bf16, fp8 = (load_file(tmp_path / "out" / name / "model.safetensors") for name in ("bf16", "fp8"))
        for name, tensor in unfolded(weights.items(), 1.5, family(engine.module.config)):
            assert torch.equal(bf16[name], tensor.bfloat16()), name
        for name, tensor in fp8.items():
            assert torch.equal(tensor.view(torch.uint8), stream[name].view(torch.uint8)), name

    build(folder, **options).load_checkpoint(str(checkpoint), del_local_after_load=False)
    with pytest.raises(
        UnsupportedConfiguration,
        match="trained with jetrl.invariant_scaling=1.5, is not .* jetrl.invariant_scaling=1: ",
    ):
        build(folder, precision="fp8_rollout", train="bf16").load_checkpoint(str(checkpoint))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", hidden_size=256).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def scaled_folder(folder, tmp_path_factory) -> str:
    """A model as an earlier stage under invariant scaling would save it before its first step."""
    path = tmp_path_factory.mktemp("scaled")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fold_missing(model, 1.5)
    model.save_pretrained(path)
    return str(path)
