# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weight syncs of a real vLLM worker: its loaders place the first one, the map of live places later ones, with the same
bits. A wrong place on either side is detected."""

from functools import partial

import pytest
import torch
import vllm_engine
from streams import parts_of_model
from tiny_models import tiny_model

from jetrl_verl.config.options import JetConfig
from jetrl_verl.models import family
from jetrl_verl.models.families.base import place
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.rollout import live as live_module
from jetrl_verl.sync.quantize import format_of
from jetrl_verl.sync.statement import ContractViolation
from jetrl_verl.train.gather import tensors_of

RULE = "fp32"
HYBRID = (
    dict(num_attention_heads=2, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4),
    dict(block_size=64, max_num_batched_tokens=128),
)
MODELS = {
    "qwen2": ({}, {}, 2 * (7 + 5) + 2),
    "qwen3_5": (*HYBRID, 2 * (8 + 6) + (7 + 4) + 2),
    "qwen3_5_moe": (*HYBRID, 2 * (9 + 7) + (8 + 5) + 2),
}
"""Changes of a tiny model, arguments of its engine, and how many tensors of a sync vLLM loads: projections and others
of each layer, the last norm and the embedding. One has biases on q, k and v, the others two linear layers and a full
one, without and with experts."""


class Engine:
    """vLLM's worker on a model of a family."""

    def __init__(self, model_type: str, folder) -> None:
        self.model_type, self.decoder = model_type, family({"model_type": model_type})
        self.changes, arguments, self.sent = MODELS[model_type]
        self.policy(0).to(torch.bfloat16).save_pretrained(folder)
        options = JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule=RULE)
        _, self.worker = vllm_engine.start(folder, options, load_format="dummy", **arguments)
        self.model = self.worker.model_runner.model

    def policy(self, seed: int):
        return tiny_model(self.model_type, seed, vocab_size=96, tie_word_embeddings=True, **self.changes)

    def sync(self, seed: int) -> None:
        vllm_engine.sync(self.worker, self.stream(seed))

    def stream(self, seed: int):
        """An actor's stream: a layer's matrices of one width in a stack, and a head tied to the embedding."""
        model, plans = self.policy(seed), plan_linears(self.policy(seed).config)
        tied = {self.decoder.head + ".weight": self.decoder.embedding + ".weight"}
        state = {n: tensor for n, tensor in model.state_dict().items() if n not in tied and ".visual." not in n}

        def weights():
            groups: dict[object, list[str]] = {}
            for name in state:
                groups.setdefault(location.layer if (location := place(name)) else name, []).append(name)
            for names in groups.values():
                shapes = [tuple(state[name].shape) for name in names]
                for item in tensors_of(names, shapes, partial(format_of, plans)):
                    yield item.name, torch.cat([state[names[i]] for i in item.members])

        return parts_of_model(model, rule=RULE, weights=weights(), tied=tied)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The bytes of every parameter."""
        return {
            name: parameter.data.as_subclass(torch.Tensor).view(torch.uint8)
            for name, parameter in self.model.named_parameters()
        }


@pytest.fixture(scope="module", params=MODELS)
def engine(request, tmp_path_factory, cpu_platform):
    with vllm_engine.cpu_settings():
        from vllm.distributed import cleanup_dist_env_and_memory

        engine = Engine(request.param, tmp_path_factory.mktemp("model"))
        yield engine
        del engine.worker, engine.model
        cleanup_dist_env_and_memory()


@pytest.fixture
def loads(engine, monkeypatch) -> list[int]:
    """Number of names in each call of vLLM's loaders."""
    calls, stock = [], engine.model.load_weights

    def load_weights(weights):
        weights = list(weights)
        calls.append(len(weights))
        return stock(weights)

    monkeypatch.setattr(engine.model, "load_weights", load_weights)
    return calls


def test_the_second_sync_calls_no_loader_and_leaves_the_same_bits(engine, loads):
    engine.sync(1)
    assert sum(loads) == engine.sent
    loads.clear()
    for parameter in engine.parameters().values():
        parameter.fill_(0x55)
    engine.sync(2)
    assert loads == []
    copied = {name: parameter.clone() for name, parameter in engine.parameters().items()}
    engine.worker._jetrl_placement._places.clear()
    engine.sync(2)
    assert sum(loads) == engine.sent
    loaded = engine.parameters()
    assert all(torch.equal(bits, loaded[name]) for name, bits in copied.items())


def test_a_copy_to_a_wrong_place_is_detected_and_the_next_sync_loads(engine, loads):
    engine.sync(3)
    engine.sync(3)
    lists = [places.copies for places in engine.worker._jetrl_placement._places.values()]
    copies, one, other = next(
        (copies, i, j)
        for copies in lists
        for i, copy in enumerate(copies)
        for j in range(i)
        if (copy.target.shape, copy.dtype) == (copies[j].target.shape, copies[j].dtype)
    )
    first, second = copies[one].target, copies[other].target
    copies[one], copies[other] = copies[one]._replace(target=second), copies[other]._replace(target=first)
    with pytest.raises(ContractViolation, match="differs between trainer and rollout"):
        engine.sync(3)
    loads.clear()
    engine.sync(3)
    assert sum(loads) == engine.sent


def test_a_wrong_map_of_live_parameters_is_detected_before_it_copies(engine):
    engine.sync(4)
    names = list(live_module.live_tensors(engine.model))
    k, v = (max(name for name in names if f"{one}_proj.weight" in name) for one in "kv")

    def swapped(model):
        tensors = live_module.live_tensors(model)
        return tensors | {k: tensors[v], v: tensors[k]}

    for _ in range(2):
        engine.worker._jetrl_live._tensors = swapped(engine.model)
        with pytest.raises(ContractViolation, match=f"{k} differs"):
            engine.sync(4)
    engine.worker._jetrl_live._places = []


@pytest.mark.parametrize(
    ("engine", "parameter", "row", "named"),
    [
        ("qwen2", "mlp.gate_up_proj.weight", -1, "mlp.up_proj.weight"),
        ("qwen3_5", "linear_attn.in_proj_qkvz.weight", 300, "linear_attn.in_proj_qkv.weight"),
        ("qwen3_5", "linear_attn.in_proj_qkvz.weight", -1, "linear_attn.in_proj_z.weight"),
        ("qwen3_5", "linear_attn.in_proj_ba.weight", -1, "linear_attn.in_proj_a.weight"),
        ("qwen3_5", "linear_attn.conv1d.weight", 300, "linear_attn.conv1d.weight"),
        ("qwen3_5", "linear_attn.A_log", 0, "linear_attn.A_log"),
        ("qwen3_5_moe", "mlp.experts.routed_experts.w2_weight", -1, "mlp.experts.down_proj"),
        ("qwen3_5_moe", "mlp.shared_expert.gate_up_proj.weight", -1, "mlp.shared_expert.up_proj.weight"),
        ("qwen3_5_moe", "mlp.shared_expert_gate.weight", 0, "mlp.shared_expert_gate.weight"),
    ],
    indirect=["engine"],
)
def test_a_flipped_bit_of_a_live_parameter_names_its_tensor(engine, parameter, row, named):
    engine.sync(7)
    value = engine.model.get_parameter(f"{engine.decoder.rollout_layers}.1.{parameter}").data
    value.as_subclass(torch.Tensor).view(torch.uint8).view(len(value), -1)[row, 0] ^= 1
    with pytest.raises(ContractViolation, match=rf"layers\.1\.{named} differs .* in 1 of"):
        engine.worker._verify(engine.worker.model_runner.vllm_config.quant_config, {})
