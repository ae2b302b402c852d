# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's LoRA in the FP8 flow under FSDP1 and FSDP2: forward, reference and weight sync are those of the model whose
weights are merged, in every bit."""

from pathlib import Path

import pytest
import torch
import transformers
from engines import build, merge_checkpoint, outputs, sent, train
from peft import PeftModel
from safetensors.torch import load_file
from streams import same
from tiny_models import tiny_model
from two_processes import run_in_two_processes

from jetrl_verl.checkpoint.export import ExportOptions, export
from jetrl_verl.train.weight_sync import WeightSync

LORA = dict(lora_rank=8, lora_alpha=32)


def whole_state(engine) -> dict[str, torch.Tensor]:
    """The engine's whole tensors by their names, BF16."""
    from verl.utils.fsdp_utils import get_fsdp_full_state_dict

    state = get_fsdp_full_state_dict(engine.module, offload_to_cpu=False, rank0_only=False)
    return {name: tensor.bfloat16() for name, tensor in state.items()}


def merged_by_hand(engine) -> dict[str, torch.Tensor]:
    """The engine's whole weights by their names without adapters, BF16."""
    state = whole_state(engine)
    weights = {name: tensor for name, tensor in state.items() if "lora_" not in name}
    for name in weights:
        if name.endswith(".base_layer.weight"):
            a, b = (state[name.replace("base_layer", f"lora_{x}.default")].double() for x in "AB")
            term = (b @ a).float() * (LORA["lora_alpha"] / LORA["lora_rank"])
            weights[name] = (term + weights[name].float()).bfloat16()
    return {name.removeprefix("base_model.model.").replace(".base_layer.", "."): w for name, w in weights.items()}


def equals_the_merged_model(rank: int, base: str, other: str, lora: dict, options: dict) -> None:
    """Two updates; ``other`` is a folder like ``base``, which gets the merged weights."""
    engine, plain = build(base, model=LORA | lora, **options), build(base, **options)
    first = sent(engine)
    assert same(first, sent(plain)), "B is zero at first"
    for _ in range(2):
        train(engine, rank)
    trained = sent(engine)
    changed = [name for name in first.sums if not torch.equal(first.sums[name], trained.sums[name])]
    weights = merged_by_hand(engine)
    if rank == 0:  # by the class, which may write other names than its own
        model = getattr(transformers, engine.module.config.architectures[0]).from_pretrained(other)
        model.load_state_dict(weights, strict=False)
        model.save_pretrained(other)
    torch.distributed.barrier()
    merged = build(other, **options)
    assert changed and same(trained, sent(merged))
    assert torch.equal(outputs(engine, rank), outputs(merged, rank))
    with engine.disable_adapter():
        assert torch.equal(outputs(engine, rank), outputs(plain, rank))
    assert torch.equal(outputs(engine, rank), outputs(merged, rank))


SHARED, TEXT = dict(operations="shared"), dict(exclude_modules=".*visual.*")
CASES = {
    "FSDP2": ("qwen3", {}, SHARED),
    "FSDP1, results kept for recomputation": ("qwen3", {}, SHARED | dict(strategy="fsdp", checkpointing="selective")),
    "FSDP1, BF16 master weights": ("qwen3", {}, SHARED | dict(strategy="fsdp", sharding=dict(model_dtype="bf16"))),
    "a list of modules, stock operations, a BF16 backward": (
        "qwen2",
        dict(target_modules=["q_proj", "o_proj", "up_proj"]),
        dict(backward="bf16", scale_rule="pow2", checkpointing=False),
    ),
    "weights gathered once, two ranks of the rollout": (
        "llama",
        {},
        SHARED | dict(gathered="batch", rollout_ranks=2),
        dict(intermediate_size=512),
    ),
    "a hybrid with a tied head": ("qwen3_5", TEXT, SHARED | dict(checkpointing="selective")),
    "a hybrid with a tied head, FSDP1": ("qwen3_5", TEXT, SHARED | dict(strategy="fsdp")),
    "the language model of one with a tower": ("qwen2_5_vl", TEXT, SHARED),
    "attention of a mixture": ("qwen3_moe", dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), SHARED),
    "BF16 linear layers": ("qwen3", {}, SHARED | dict(precision="bf16_shared", train="bf16", rollout="bf16")),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_the_model_of_merged_weights(case, tmp_path_factory, cpu_platform):
    family, lora, options, *changes = CASES[case]
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("base", "merged")]
    for folder in folders:
        changed = changes[0] if changes else dict(tie_word_embeddings=family == "qwen3_5")
        tiny_model(family, **changed).save_pretrained(folder)
    run_in_two_processes(equals_the_merged_model, *folders, lora, options)


def a_checkpoint_is_verls(rank: int, folder: str, step: str, strategy: str) -> None:
    """Names of its tensors; a resume sends the same weights and goes on alike; the export has the sync's bytes, and the
    folders of verl's merger those of the checkpoint."""
    options = SHARED | dict(strategy=strategy)
    engine, stock = build(folder, model=LORA, **options), build(folder, model=LORA, precision="bf16", strategy=strategy)
    assert list(engine.module.state_dict()) == list(stock.module.state_dict())
    train(engine, rank)
    actor = f"{step}/actor"
    engine.save_checkpoint(actor, global_step=1)
    before = sent(engine)
    resumed = build(folder, model=LORA, **options)
    resumed.load_checkpoint(actor, del_local_after_load=False)
    assert same(sent(resumed), before)
    state = whole_state(engine)
    assert train(resumed, rank) == train(engine, rank) and same(sent(resumed), sent(engine))
    if rank == 0:
        (exported,) = export(Path(step), Path(step).with_name("exported"), ExportOptions("fp8"))
        tensors = load_file(exported.folder / "model.safetensors")
        assert all(
            torch.equal(tensors[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before.quantized
        )
        merge_checkpoint(Path(actor), merged := Path(step).with_name("merged"))
        base = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16)
        model = PeftModel.from_pretrained(base, str(merged / "lora_adapter"), autocast_adapter_dtype=False)
        assert (settings := model.peft_config["default"]).r == LORA["lora_rank"]
        assert settings.lora_alpha == LORA["lora_alpha"]
        assert model.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    engine.feature(WeightSync).save_merged(Path(actor) / "huggingface")
    whole = build(f"{actor}/huggingface", **options)
    assert torch.equal(outputs(engine, rank), outputs(whole, rank))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_checkpoint_of_adapters_is_verls(strategy, tmp_path, cpu_platform):
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    run_in_two_processes(a_checkpoint_is_verls, str(tmp_path / "base"), str(tmp_path / "global_step_1"), strategy)
