# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What decoder layers keep for their recomputation: no bit, and no product or attention, differs from layers that are
not recomputed; the memory is that of ``jetrl memory``. FSDP and Ulysses: test_sequence_parallel_on_cpu.py."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_exact_trainer_on_cpu import stock, tokens
from tiny_models import packed
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_verl.kernels.recomputation import LayerForward, layer_contexts
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.checkpointing import MARGIN, Room, checkpoint
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.tools.memory.shapes import FP32, model_of
from jetrl_verl.tools.memory.terms import layer_results
from jetrl_verl.train import features
from jetrl_verl.train.shared_operations import share_operations

DEAR = ("gemm_nt", "grouped_gemm_nt", "attention", "gated_delta_rule", "logits", "mm", "addmm")
"""Operators that a layer runs once."""


class Calls(TorchDispatchMode):
    """Counts the calls of ``DEAR`` operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts.update([name] if name in DEAR else [])
        return func(*args, **(kwargs or {}))


def model_of_family(family: str, linears: str = "fp8", kv_cache: str = "bf16", device: str = "cpu"):
    model = stock(family).to(device)
    if linears == "fp8":
        replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    share_operations(model, kv_cache)
    return model.train()


def step(model) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Logits and gradients, and the operators of the backward."""
    inputs = {name: x.to(model.device) for name, x in packed(tokens()).items()}
    logits = model(**inputs, use_cache=False).logits
    with Calls() as calls:
        logits.logsumexp(-1).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}, calls.counts


CASES = (
    ("llama", "fp8", "bf16"),
    ("qwen2", "bf16", "bf16"),
    ("qwen3", "fp8", "fp8"),
    ("qwen3", "bf16", "fp8"),
    ("qwen3_moe", "fp8", "bf16"),
    ("qwen3_5", "fp8", "bf16"),
    ("qwen3_5", "bf16", "bf16"),
    ("qwen3_5_moe", "fp8", "bf16"),
)
"""Family, linear layers and KV cache."""


def check_bits_products_and_memory(family: str, linears: str, kv_cache: str, device: str) -> None:
    """Of no, torch's, full and selective checkpointing of one model."""
    expected, of_gradients = step(model_of_family(family, linears, kv_cache, device))

    def compare(model) -> Counter[str]:
        results, calls = step(model)
        assert results.keys() == expected.keys()
        assert all(torch.equal(result, expected[name]) for name, result in results.items())
        return calls - of_gradients

    torchs, full = (model_of_family(family, linears, kv_cache, device) for _ in range(2))
    torchs.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpoint(full, partial(layer_contexts, False))
    # torch stops at the last operation that saves a tensor, before a product of its own and after one of ours. The
    # products of experts are one result with what their gradient reads.
    layers = 0 if linears == "bf16" or family.endswith("_moe") else full.config.get_text_config().num_hidden_layers
    assert compare(torchs).total() - compare(full).total() == layers

    forwards: list[LayerForward] = []
    held: list[int] = []

    def contexts():
        forward, recomputation = layer_contexts(True)
        forwards.append(forward)
        return forward, recomputation

    selective = model_of_family(family, linears, kv_cache, device)
    checkpoint(selective, contexts)
    selective.lm_head.register_forward_hook(lambda *_: held.extend(forward.nbytes for forward in forwards))
    assert not compare(selective)

    sizes = model_of(family, selective.config.to_dict())
    count = expected["logits"].shape[1]
    # A CPU's attention has no log-sum-exp; the last result of a layer is one BF16 number.
    log_sums = FP32 * sizes.caching * selective.config.get_text_config().num_attention_heads * count
    log_sums = log_sums if device == "cpu" else 0
    assert sum(held) == layer_results(sizes, count) - log_sums + 2 * sizes.layers
    assert not any(forward.nbytes > 2 for forward in forwards), "backward frees them"


@pytest.mark.parametrize(("family", "linears", "kv_cache"), CASES)
def test_kept_results_change_no_bit_and_repeat_no_product(family, linears, kv_cache):
    check_bits_products_and_memory(family, linears, kv_cache, "cpu")


def test_a_second_backward_says_that_results_are_gone():
    model = model_of_family("qwen3")
    checkpoint(model, partial(layer_contexts, True))
    loss = model(**packed(tokens()), use_cache=False).logits.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="an earlier backward took it, .* Run one backward for"):
        loss.backward()


def test_as_many_layers_keep_results_as_leave_room():
    """A made-up GPU: 100 bytes are allocated, and a full pass of 71 tokens needs 1,000 more. A layer keeps 254,466."""
    total, allocated, peak, free = 1e9, 100, 1100, 0.0
    room = Room(lambda: (allocated, peak, free, total))
    model = model_of_family("qwen3")
    checkpoint(model, room.contexts)
    expected, _ = step(model_of_family("qwen3"))

    def layers_that_keep(free_bytes: float, count: int, gradients: bool = False) -> int:
        nonlocal free
        free = free_bytes
        room.layers.clear()
        model.zero_grad()
        room.start(count, gradients)
        results, _ = step(model)
        room.end()
        assert all(torch.equal(result, expected[name]) for name, result in results.items())
        assert len(room.layers) == 2
        return sum(room.layers)

    reserve, layer = MARGIN * total + 1000, 254_466
    assert layers_that_keep(1e12, 71) == 0, "the need is measured"
    assert layers_that_keep(reserve, 71) == 0
    assert layers_that_keep(reserve + layer, 71) == 1, "the first shows its size"
    assert layers_that_keep(reserve + layer, 71) == 0
    assert layers_that_keep(reserve + layer + 100, 71) == 1
    assert layers_that_keep(reserve + 2 * layer + 100, 71) == 2
    assert layers_that_keep(reserve + 2 * layer + 100, 142) == 0, "the need grows with the tokens"
    assert layers_that_keep(reserve + 2 * layer + 1100, 142) == 1, "and so does a layer"
    assert layers_that_keep(1e12, 71, gradients=True) == 0, "the need is measured"
    assert layers_that_keep(1e12, 71, gradients=True) == 2


def test_the_engine_measures_both_kinds_of_passes_and_reports_what_layers_keep(monkeypatch):
    monkeypatch.setattr(features, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(features, "Room", partial(Room, lambda: (100, 1100, 1e12, 1e9)))
    model = model_of_family("qwen3")
    options, offload = SimpleNamespace(checkpointing="auto"), SimpleNamespace(enable_activation_offload=False)
    config = SimpleNamespace(jetrl=SimpleNamespace(options=options))
    feature = features.Checkpointing(SimpleNamespace(engine_config=config, model_config=offload, module=model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    feature.install(model)
    micro_batch = {"input_ids": torch.zeros(1, 71)}

    def two_micro_batches() -> dict:
        model.zero_grad()
        for _ in range(2):
            feature.prepare_model_inputs(lambda inputs: (inputs, {}), micro_batch)
            step(model)
        return {"metrics": {}}

    for share in (0.0, 1.0):
        outputs = feature.train_batch(partial(feature.forward_backward_batch, two_micro_batches))
        assert outputs["metrics"] == {"actor/jetrl/layers_kept": [share]}
