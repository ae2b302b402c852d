# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's engine in the FP8 flow under FSDP2 on two gloo processes: steps, weight syncs, checkpoints. It comes from
verl's registry, so the registration overrides verl's own engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines import SEQUENCES, TOKENS, batch, build, outputs, quantized, sent, tokens, train
from safetensors.torch import load_file
from streams import same
from tiny_models import tiny_model
from torch import nn
from two_processes import WORLD, in_two_processes, run_in_two_processes

from jetrl_verl.checkpoint.validation import DamagedCheckpointError
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.reference import FP8_DTYPE
from jetrl_verl.sync.finite import NonFiniteWeightError
from jetrl_verl.sync.statement import ContractViolation, Statement
from jetrl_verl.train.weight_stream import sync_parts

pytestmark = pytest.mark.usefixtures("cpu_platform")


def same_on_both_ranks(value: torch.Tensor) -> bool:
    values = [torch.empty_like(value) for _ in range(WORLD)]
    dist.all_gather(values, value)
    return all(torch.equal(value, other) for other in values)


def gradient_norm_by_hand(folder: str) -> torch.Tensor:
    """Norm of the mean gradient over all ranks' tokens, in one process without FSDP."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    for parameter in model.parameters():  # not .to(): the rotary table is a buffer and stays FP32
        parameter.data = parameter.data.to(torch.bfloat16)
    total: dict[str, torch.Tensor] = {}
    for rank in range(WORLD):
        for rows in tokens(rank).chunk(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(rows, use_cache=False).logits
            losses = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum"
            )
            (losses / (WORLD * SEQUENCES * (TOKENS - 1))).backward()
            for name, parameter in model.named_parameters():
                total[name] = total.get(name, 0) + parameter.grad.float()
                parameter.grad = None
    return torch.stack([gradient.norm() for gradient in total.values()]).norm()


@in_two_processes
def test_steps_and_syncs_agree_with_one_process_and_between_ranks(rank, folder):
    engine = build(folder)
    assert type(engine).__name__ == "JetFSDPEngine"
    linears = [module for module in engine.module.modules() if isinstance(module, JetLinear)]
    assert len(linears) == 14

    first = sent(engine)
    # Blocks of dY differ if one process has all rows, so they are quantized differently.
    assert train(engine, rank) == pytest.approx(gradient_norm_by_hand(folder).item(), rel=5e-3)
    assert all(not layer.holds_qdata for layer in linears), "qdata outlives the pass"
    second = sent(engine)

    assert first.keys() == second.keys()
    assert sum(tensor.dtype == FP8_DTYPE for tensor in first.values()) == 14
    assert len(second.quantized) == 14 and second.manifest.scale_rule == "fp32"
    for name in second.quantized:
        sums = second.sums[name]
        assert not torch.equal(sums, first.sums[name]), f"{name} did not move"
        assert same_on_both_ranks(sums), f"{name} differs between ranks"


def keeps_its_tower(engine, folder: str) -> bool:
    """Whether a vision tower, if the model has one, is as the folder has it, in all bits of FP32."""
    state, published = engine.module.state_dict(), load_file(Path(folder) / "model.safetensors")
    return all(torch.equal(state[name].full_tensor(), tensor) for name, tensor in published.items() if "visual" in name)


def fsdp1_takes_the_same_steps(rank: int, folder: str) -> None:
    """The first gradient and the weight syncs before and after it are those of FSDP2."""
    options = dict(scale_rule="pow2", backward="bf16", optimizer={"weight_decay": 0.1})
    runs = []
    for strategy in ("fsdp", "fsdp2"):
        engine = build(folder, strategy=strategy, **options)
        runs.append((sent(engine), train(engine, rank), sent(engine)))
        assert keeps_its_tower(engine, folder), strategy
    (first, norm, second), (expected, expected_norm, _) = runs
    # FSDP1 has embedding, last norm and head in one unit, so names come in another order.
    manifests = [replace(stream.manifest, weights=[]) for stream in (first, expected)]
    assert manifests[0] == manifests[1] and set(first.quantized) == set(expected.quantized)
    assert first.sums.keys() == expected.sums.keys()
    assert all(torch.equal(sums, expected.sums[name]) for name, sums in first.sums.items())
    assert same(first, expected)
    assert norm == pytest.approx(expected_norm, rel=1e-3)
    assert len(second.quantized) == len(quantized(engine.module)) and second.manifest.scale_rule == "pow2"
    assert not any("visual" in name for name in first), "the rollout has no vision tower"
    assert all(not torch.equal(second.sums[name], first.sums[name]) for name in second.quantized)
    build(folder, "ref", strategy="fsdp", ref="fp8").infer_batch(batch(rank))


def images_train_and_send_the_tower(rank: int, folder: str) -> None:
    """Rank 0 has a sequence with an image in one of its micro-batches, rank 1 has text alone."""
    pixels = torch.randn(16, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(0))
    for strategy, packed in (("fsdp2", True), ("fsdp", False)):
        engine = build(folder, strategy=strategy, images=True, operations="shared")
        first = sent(engine)
        train(engine, rank, packed=packed, pixels=pixels if rank == 0 else None)
        second = sent(engine)
        tower = [name for name in first.sums if "visual" in name]
        still = [name for name in tower if torch.equal(first.sums[name], second.sums[name])]
        # A step is less than a BF16 place of a norm's or a bias's numbers.
        assert tower and not [name for name in still if first[name].ndim > 1], strategy
        assert all(same_on_both_ranks(second.sums[name]) for name in tower), strategy


@in_two_processes
def test_restored_weights_are_those_of_the_next_pass(rank, folder):
    """As verl's decoupled PPO saves and restores them. A pass without gradients may leave weights gathered."""
    from verl.utils import fsdp_utils

    for strategy, sharding in (("fsdp", {}), ("fsdp2", {}), ("fsdp2", {"reshard_after_forward": False})):
        engine = build(folder, strategy=strategy, sharding=sharding)
        number = 1 if strategy == "fsdp" else 2
        save, load = (getattr(fsdp_utils, f"fsdp{number}_sharded_{name}_cpu") for name in ("save_to", "load_from"))
        saved, log_probs = [], []
        for _ in range(2):
            state = save(engine.module)
            saved.append(state if number == 2 else (state,))
            log_probs.append(outputs(engine, rank))
            train(engine, rank)
        assert not torch.equal(*log_probs), "the step moved nothing"
        for version in (0, 1, 0):
            load(engine.module, *saved[version])
            assert torch.equal(outputs(engine, rank), log_probs[version]), (strategy, sharding, version)


@in_two_processes
def test_replicas_send_the_same_weights(rank, folder):
    """Each rank has its own data. FSDP1 with one rank a replica is refused (config/support): torch then reduces no
    gradients, which the contract check detects on both ranks."""
    for strategy, fsdp_size in (("fsdp2", -1), ("fsdp2", 1), ("fsdp", -1)):
        engine = build(folder, strategy=strategy, fsdp_size=fsdp_size)
        train(engine, rank)
        sums = [sums.flatten() for _, sums in sorted(sent(engine).sums.items())]
        assert same_on_both_ranks(torch.cat(sums)), (strategy, fsdp_size)
    diverged = build(folder, strategy="fsdp", fsdp_size=1)
    sent(diverged)
    train(diverged, rank)
    with pytest.raises(ContractViolation, match=r"model\.embed_tokens\.weight of the trainer's rank 1 differs"):
        sent(diverged)


@in_two_processes
def test_the_contract_check_compares_the_trainers_ranks(rank):
    """The first tensor that differs is named on both ranks; equal ones pass."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layer.{number}": torch.randn(40, 24, generator=generator).bfloat16() for number in range(4)}

    def compared() -> int:
        return len(list(sync_parts(weights.items(), Statement(scale_rule="fp32", probe=None))))

    assert compared() == len(weights) + 2, "weights, sums and manifest"
    if rank == 1:
        weights["layer.3"] = weights["layer.3"].roll(1, dims=0)  # the same rows in another order
        weights["layer.2"][39, 23] += 1
    with pytest.raises(ContractViolation, match="layer.2 of the trainer's rank 1 differs from that of rank 0"):
        compared()
    weights["layer.2"] = torch.zeros(1).bfloat16()
    with pytest.raises(ContractViolation, match="layer.3 of the trainer's rank 1"):
        compared()


@in_two_processes
def test_a_checkpoint_restores_what_is_sent_and_is_refused_once_damaged(rank, folder, other, tmp_path):
    checkpoint = str(tmp_path / "global_step_1" / "actor")
    engine = build(folder)
    train(engine, rank)
    engine.save_checkpoint(checkpoint, global_step=1)
    expected = sent(engine)
    expected_norm = train(engine, rank)

    resumed = build(other)
    resumed.load_checkpoint(checkpoint, del_local_after_load=False)
    assert same(sent(resumed), expected)
    assert train(resumed, rank) == expected_norm
    after = sent(engine)
    assert same(sent(resumed), after), "the optimizer's state was not restored"

    file = Path(checkpoint) / f"optim_world_size_2_rank_{rank}.pt"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(DamagedCheckpointError, match=f"optim_world_size_2_rank_{rank}.pt is damaged"):
        engine.load_checkpoint(checkpoint, del_local_after_load=False)
    assert same(sent(engine), after)


@in_two_processes
def test_each_role_has_the_linears_of_its_option(rank, folder):
    def kinds(engine) -> set[type]:
        return {type(m) for name, m in engine.module.named_modules() if name.endswith("_proj")}

    rollout_only = build(folder, precision="fp8_rollout", train="bf16")
    assert kinds(rollout_only) == {nn.Linear}
    qdata = sent(rollout_only)
    assert sum(tensor.dtype == FP8_DTYPE for tensor in qdata.values()) == 14 and same(sent(build(folder)), qdata)

    reference = build(folder, role="ref")
    assert kinds(reference) == {nn.Linear}
    assert all(tensor.dtype != FP8_DTYPE for _, tensor in reference.get_per_tensor_param()[0])
    assert kinds(build(folder, role="ref", ref="fp8")) == {JetLinear}

    assert kinds(build(folder, role="critic")) == {nn.Linear}
    assert kinds(build(folder, role="critic", critic="fp8")) == {JetLinear}


@in_two_processes
def test_vocabulary_entries_without_a_token_are_masked(rank, padded_folder):
    folder, used = padded_folder
    engine = build(folder, tokenizer=True)
    with engine.eval_mode():
        rows = engine.infer_batch(batch(rank))["model_output"]["log_probs"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = engine.module(tokens(rank), use_cache=False).logits.float()
    assert logits[..., used:].max() < -1e6
    expected = logits[..., :used].log_softmax(-1)[:, :-1].gather(-1, tokens(rank)[:, 1:, None]).squeeze(-1)
    log_probs = torch.stack(rows.unbind()).float()[:, :-1]
    assert torch.allclose(log_probs, expected, atol=0.05)


@pytest.fixture(scope="module")
def padded_folder(tmp_path_factory) -> tuple[str, int]:
    """A model with more vocabulary entries than its tokenizer has tokens, and the number of tokens."""
    from jetrl_verl.tools.demo.policy import build_tokenizer

    path = tmp_path_factory.mktemp("padded")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(path)
    tiny_model("qwen3", vocab_size=len(tokenizer) + 29).save_pretrained(path)
    return str(path), len(tokenizer)


@in_two_processes
def test_quantization_is_measured_once_a_sync_and_a_nan_weight_is_named(rank, folder, tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    from functools import partial

    from verl.workers.utils.losses import sft_loss

    def step() -> dict[str, list[float]]:
        with engine.train_mode():
            metrics = engine.train_batch(batch(rank), partial(sft_loss, None))["metrics"]
        return {name: value for name, value in metrics.items() if name.startswith("jetrl/") and "sync_" not in name}

    engine = build(folder)
    assert step() == {}, "nothing is measured before the first sync"
    sent(engine)
    first = step()
    assert len(first) == 48 and all(len(value) == 1 for value in first.values())
    assert step() == {}, "measured in more than one mini-batch"
    sent(engine)
    second = step()
    assert {name for name in second if "changed" in name} == {
        f"jetrl/{what}_changed/{kind}" for what in ("qdata", "scales") for kind in ("qkv", "o", "gate_up", "down")
    }
    shares = torch.tensor([second[name][0] for name in sorted(second) if "changed" in name])
    assert (shares[:4] > 0).all() and same_on_both_ranks(shares)

    unmeasured = build(folder, metrics=False)
    sent(unmeasured)
    with unmeasured.train_mode():
        metrics = unmeasured.train_batch(batch(rank), partial(sft_loss, None))["metrics"]
    assert not any(name.startswith("jetrl/") and "sync_" not in name for name in metrics)

    poisoned = "model.layers.1.mlp.up_proj.weight"
    if rank == 1:
        with torch.no_grad():
            dict(engine.module.named_parameters())[poisoned].to_local()[0, 0] = float("nan")
    with pytest.raises(NonFiniteWeightError, match=f"{poisoned} of the trainer has NaN"):
        sent(engine)
    where = poisoned if rank == 1 else "a weight on another rank"
    with pytest.raises(NonFiniteWeightError, match=f"checkpoint: {where} of the trainer .* so it is not saved"):
        engine.save_checkpoint(checkpoint, global_step=1)
    assert not Path(checkpoint).exists()


def saved(folder: Path, seed: int) -> str:
    tiny_model("qwen2", seed).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> str:
    """A model of the same shape with other weights."""
    return saved(tmp_path_factory.mktemp("other"), seed=1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5"])
def test_fsdp1_takes_the_same_steps(family, tmp_path):
    tiny_model(family, tie_word_embeddings=family == "qwen3_5").save_pretrained(tmp_path)
    run_in_two_processes(fsdp1_takes_the_same_steps, str(tmp_path))


def test_images_train_and_send_the_tower(tmp_path):
    tiny_model("qwen3_vl").save_pretrained(tmp_path)
    run_in_two_processes(images_train_and_send_the_tower, str(tmp_path))
