# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An exported FP8 folder in vLLM: stock vLLM's configuration reads it, and vLLM's loader gives our method's layers the
bytes of a weight sync. Stock block-FP8 kernels need a GPU or AMX (test_export_on_gpu.py).
"""

import json
from contextlib import contextmanager

import pytest
import served_mixture
import torch
import vllm_engine
from served_mixture import PROMPT, RULE
from streams import receiver_of
from tiny_models import tiny_model
from transformers import AutoConfig

from jetrl_verl import formats
from jetrl_verl.checkpoint.export import ExportOptions, export
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models import family
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.sync.quantize import quantize_stream
from jetrl_verl.sync.statement import ContractViolation

HYBRID = dict(tie_word_embeddings=True), dict(block_size=64, max_num_batched_tokens=64), "stop"
POLICIES = {
    "qwen2": (dict(hidden_size=256, intermediate_size=320), {}, "skip", (8, 19)),
    "qwen3_5": (*HYBRID, (19, 23)),
    "qwen3_5_moe": (*HYBRID, (25, 29)),
    "qwen3_moe": ({}, {}, "stop", (2 * (4 + 2), 2 * 5 + 3)),
}
"""Changes of a tiny model, arguments of its engine, the option ``unfit_layers``, and FP8 and BF16 tensors in vLLM. One
has an MLP that does not fit 128x128 blocks, two a vision tower and delta nets, two experts (served_mixture.py)."""


class Policy:
    """A trainer's FP32 master weights, and the folder exported from them."""

    def __init__(self, model_type: str, root) -> None:
        changes, self.arguments, self.unfit_layers, self.counts = POLICIES[model_type]
        self.decoder, self.folder = family({"model_type": model_type}), root / "fp8"
        if self.decoder.experts is not None:
            self.trainer = served_mixture.policy(model_type, **changes)
        else:
            self.trainer = tiny_model(model_type, 1, vocab_size=96, **changes)
        self.trainer.save_pretrained(root / "policy")
        export(root / "policy", self.folder, ExportOptions("fp8", unfit_layers=self.unfit_layers))

    def verify(self, model, weights) -> dict:
        """The contract check of a weight sync, against a trainer with these weights."""
        from jetrl_verl.rollout.live import live_tensors

        sent = {name: tensor for name, tensor in weights.items() if ".visual." not in name}
        probe = formats.get("fp8").probe(torch.device("cpu"), RULE)
        plans = plan_linears(self.trainer.config, unfit_layers=self.unfit_layers)
        receiver = receiver_of(quantize_stream(sent.items(), plans, RULE), scale_rule=RULE, probe=probe)
        return receiver.verify(live_tensors(model), scale_rule=RULE, probe=probe)


@pytest.fixture(scope="module", params=POLICIES)
def policy(request, tmp_path_factory):
    return Policy(request.param, tmp_path_factory.mktemp("export"))


@contextmanager
def engine(folder, options: JetConfig | None, **arguments):
    """(vLLM, its model) on a folder."""
    with vllm_engine.cpu_settings():
        from vllm.distributed import cleanup_dist_env_and_memory

        llm, worker = vllm_engine.start(folder, options, **{"load_format": "auto", **arguments})
        yield llm, worker.model_runner.model
        del llm, worker
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def loaded(policy, cpu_platform):
    """(vLLM, its model), loaded from the exported folder."""
    options = JetConfig("fp8_rollout", train="bf16", rollout="fp8", scale_rule=RULE, unfit_layers=policy.unfit_layers)
    with engine(policy.folder, options, **policy.arguments) as llm_and_model:
        yield llm_and_model


def test_loaded_parameters_equal_those_of_a_weight_sync(loaded, policy):
    llm, model = loaded
    counts = policy.verify(model, policy.trainer.state_dict())
    assert (counts["quantized"], counts["plain"]) == policy.counts
    assert json.loads((policy.folder / "jetrl_export.json").read_text())["digest"] == f"{counts['digest']:#018x}"
    if policy.decoder.experts is not None:
        served_mixture.check_served(policy.trainer, vllm_engine.prompt_log_probs(llm, PROMPT))


def test_another_checkpoint_violates_the_contract(loaded, policy):
    weights = {name: tensor.clone() for name, tensor in policy.trainer.state_dict().items()}
    ending = "mlp.experts.down_proj" if policy.decoder.experts is not None else "mlp.down_proj.weight"
    name = f"{policy.decoder.layers}.1.{ending}"
    weights[name][..., 3, 5] *= 1.5
    with pytest.raises(ContractViolation, match=f"{name} differs"):
        policy.verify(loaded[1], weights)


BF16 = {
    "qwen2": {"mlp.gate_up_proj", "mlp.down_proj"},
    "qwen3_5": {"linear_attn.in_proj_ba", "visual.blocks.0.attn.qkv", "visual.merger.linear_fc2"},
    "qwen3_moe": {"model.layers.0.mlp.gate"},
}
BF16["qwen3_5_moe"] = BF16["qwen3_5"] | {"language_model.model.layers.0.mlp.gate", "mlp.shared_expert_gate"}


def test_stock_vllm_reads_the_quantization_config(policy):
    """Skipped layers by vLLM's names, of merged projections, too."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.models import ModelRegistry

    (architecture,) = (facts := json.loads((policy.folder / "config.json").read_text()))["architectures"]
    stock = ModelRegistry._try_load_model_cls(architecture)
    if policy.decoder.experts is not None:  # transformers 4 and 5 write it under one name
        read = AutoConfig.from_pretrained(policy.folder).get_text_config()
        assert facts.get("text_config", facts)["num_experts"] == read.num_experts == 8
    config = Fp8Config.from_config(facts["quantization_config"])
    assert config.is_checkpoint_fp8_serialized and config.activation_scheme == "dynamic"
    assert config.weight_block_size == [128, 128]
    if (mapper := getattr(stock, "hf_to_vllm_mapper", None)) is not None:
        config.apply_vllm_mapper(mapper)
    bf16 = BF16[policy.decoder.model_type]
    names = {f"{policy.decoder.rollout_layers}.1.{linear.name}" for linear in policy.decoder.linears}
    skipped = {
        name for name in names | bf16 if is_layer_skipped(name, config.ignored_layers, stock.packed_modules_mapping)
    }
    assert {name.removeprefix(f"{policy.decoder.rollout_layers}.1.") for name in skipped} == bf16
    assert is_layer_skipped("lm_head", config.ignored_layers, stock.packed_modules_mapping)


def test_stock_vllm_serves_the_bf16_folder_of_a_mixture(tmp_path, cpu_platform):
    served_mixture.policy().save_pretrained(tmp_path / "policy")
    export(tmp_path / "policy", tmp_path / "bf16", ExportOptions("bf16"))
    with engine(tmp_path / "bf16", None) as (llm, _):
        served = vllm_engine.prompt_log_probs(llm, PROMPT)
    model = served_mixture.policy().bfloat16()
    expected = vllm_engine.model_log_probs(model, PROMPT)
    # BF16 on both sides; the bound is 5% of the distance to a uniform policy.
    assert (served - expected).abs().mean() < 0.05 * (expected + torch.tensor(64.0).log()).abs().mean()
