# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weight syncs of a real vLLM worker: its loaders place the first one, the map of live places later ones, with the same
bits. A wrong place on either side is detected."""

import pytest
import torch
import vllm_engine
from tiny_models import tiny_model

from jetrl_verl import formats
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.rollout import live as live_module
from jetrl_verl.sync.quantize import quantize_stream
from jetrl_verl.sync.stacks import Stack
from jetrl_verl.sync.statement import ContractViolation, Statement
from jetrl_verl.train.weight_stream import stated_constants, sync_parts

RULE = "fp32"


@pytest.fixture(scope="module")
def worker(tmp_path_factory, cpu_platform):
    """vLLM's worker on a model with biases on q, k and v and a tied head."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", 0, vocab_size=96, tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(folder)
    options = JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule=RULE)
    with vllm_engine.cpu_settings():
        _, worker = vllm_engine.start(folder, options, load_format="dummy")
        yield worker


def stream(seed: int):
    """An actor's stream: matrices of one width in stacks, and a head tied to the embedding."""
    model = tiny_model("qwen2", seed, vocab_size=96, tie_word_embeddings=True)
    state, plans = model.state_dict(), plan_linears(model.config)
    groups = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),)
    groups += (("self_attn.o_proj",), ("mlp.down_proj",))

    def weights():
        names = [[f"model.layers.{i}.{name}.weight" for i in range(2) for name in group] for group in groups]
        names.append([name for name in state if name.endswith((".bias", "norm.weight"))])
        for group in names:
            yield Stack(tuple(group), tuple(len(state[name]) for name in group)), torch.cat([state[n] for n in group])
        yield "model.embed_tokens.weight", state["model.embed_tokens.weight"]

    probe = formats.get("fp8").probe(torch.device("cpu"), RULE)
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    statement = Statement(scale_rule=RULE, probe=probe, constants=stated_constants(model), tied=tied)
    return sync_parts(quantize_stream(weights(), plans, RULE), statement)


def parameters(worker) -> dict[str, torch.Tensor]:
    return {
        name: parameter.data.as_subclass(torch.Tensor).view(torch.uint8).clone()
        for name, parameter in worker.model_runner.model.named_parameters()
    }


@pytest.fixture
def loads(worker, monkeypatch) -> list[int]:
    """Number of names in each call of vLLM's loaders."""
    calls, stock = [], worker.model_runner.model.load_weights

    def load_weights(weights):
        weights = list(weights)
        calls.append(len(weights))
        return stock(weights)

    monkeypatch.setattr(worker.model_runner.model, "load_weights", load_weights)
    return calls


def test_the_second_sync_calls_no_loader_and_leaves_the_same_bits(worker, loads):
    vllm_engine.sync(worker, stream(1))
    assert sum(loads) == 2 * 7 + 2 * 5 + 1 + 1, "weights, two norms and three biases a layer, last norm, embedding"
    loads.clear()
    for parameter in worker.model_runner.model.parameters():
        parameter.data.as_subclass(torch.Tensor).view(torch.uint8).fill_(0x55)
    vllm_engine.sync(worker, stream(2))
    assert loads == []
    copied = parameters(worker)
    worker._jetrl_placement._places.clear()
    vllm_engine.sync(worker, stream(2))
    assert sum(loads) == 26
    loaded = parameters(worker)
    assert all(torch.equal(bits, loaded[name]) for name, bits in copied.items())


def test_a_copy_to_a_wrong_place_is_detected_and_the_next_sync_loads(worker, loads):
    vllm_engine.sync(worker, stream(3))
    vllm_engine.sync(worker, stream(3))
    copies = next(places.copies for places in worker._jetrl_placement._places.values() if len(places.copies) > 3)
    sizes = [copy.target.shape for copy in copies]
    one, other = next((i, j) for i in range(len(sizes)) for j in range(i) if sizes[i] == sizes[j])
    first, second = copies[one].target, copies[other].target
    copies[one], copies[other] = copies[one]._replace(target=second), copies[other]._replace(target=first)
    with pytest.raises(ContractViolation, match="differs between trainer and rollout"):
        vllm_engine.sync(worker, stream(3))
    loads.clear()
    vllm_engine.sync(worker, stream(3))
    assert sum(loads) == 26


def test_a_wrong_map_of_live_parameters_is_detected_before_it_copies(worker):
    vllm_engine.sync(worker, stream(4))
    stock = live_module.live_tensors

    def swapped(model):
        tensors = stock(model)
        k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
        return tensors | {k: tensors[v], v: tensors[k]}

    for _ in range(2):
        worker._jetrl_live._tensors = swapped(worker.model_runner.model)
        with pytest.raises(ContractViolation, match=r"layers\.1\.self_attn\.k_proj\.weight differs"):
            vllm_engine.sync(worker, stream(4))
    worker._jetrl_live._places = []


def test_a_parameter_that_moved_is_loaded_at_its_new_address(worker, loads):
    vllm_engine.sync(worker, stream(5))
    loads.clear()
    weight = worker.model_runner.model.model.layers[1].mlp.down_proj.weight
    before = weight.data
    weight.data = torch.zeros_like(before)
    vllm_engine.sync(worker, stream(6))
    assert sum(loads) == 26 and not torch.equal(before.view(torch.uint8), weight.data.view(torch.uint8))
    loads.clear()
    vllm_engine.sync(worker, stream(6))
    assert loads == []
