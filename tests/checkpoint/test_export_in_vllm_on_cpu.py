# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An exported FP8 folder in vLLM: stock vLLM's configuration reads it, and vLLM's loader gives our method's layers the
bytes of a weight sync. Stock block-FP8 kernels need a GPU or AMX (test_export_on_gpu.py).
"""

import json

import pytest
import torch
import vllm_engine
from streams import receiver_of
from tiny_models import tiny_model

from jetrl_verl import formats
from jetrl_verl.checkpoint.export import ExportOptions, export
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.sync.quantize import quantize_stream
from jetrl_verl.sync.statement import ContractViolation

RULE = "fp32"


def trainer(seed: int):
    """FP32 master weights; the MLP does not fit 128x128 blocks and is skipped."""
    return tiny_model("qwen2", seed, vocab_size=96, hidden_size=256, intermediate_size=320)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    trainer(1).save_pretrained(root / "policy")
    export(root / "policy", root / "fp8", ExportOptions("fp8", unfit_layers="skip"))
    return root / "fp8"


@pytest.fixture(scope="module")
def model(folder, cpu_platform):
    """vLLM's model, loaded from the exported folder."""
    options = JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule=RULE, unfit_layers="skip")
    with vllm_engine.cpu_settings():
        _, worker = vllm_engine.start(folder, options)
        yield worker.model_runner.model


def verify(model, weights) -> dict:
    """The contract check of a weight sync, against a trainer with these weights."""
    from jetrl_verl.rollout.live import live_tensors

    reference = trainer(1)
    probe = formats.get("fp8").probe(torch.device("cpu"), RULE)
    plans = plan_linears(reference.config, unfit_layers="skip")
    receiver = receiver_of(quantize_stream(weights.items(), plans, RULE), scale_rule=RULE, probe=probe)
    return receiver.verify(live_tensors(model), scale_rule=RULE, probe=probe)


def test_loaded_parameters_equal_those_of_a_weight_sync(model, folder):
    """Four projections of each layer are FP8."""
    counts = verify(model, trainer(1).state_dict())
    assert (counts["quantized"], counts["plain"]) == (8, 19)
    assert json.loads((folder / "jetrl_export.json").read_text())["digest"] == f"{counts['digest']:#018x}"


def test_another_checkpoint_violates_the_contract(model):
    weights = trainer(1).state_dict()
    weights["model.layers.1.self_attn.o_proj.weight"][3, 5] *= 1.5
    with pytest.raises(ContractViolation, match=r"layers\.1\.self_attn\.o_proj\.weight differs"):
        verify(model, weights)


def test_stock_vllm_reads_the_quantization_config(folder):
    """Skipped layers by vLLM's names of merged projections."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    config = Fp8Config.from_config(json.loads((folder / "config.json").read_text())["quantization_config"])
    assert config.is_checkpoint_fp8_serialized and config.activation_scheme == "dynamic"
    assert config.weight_block_size == [128, 128]
    merged = Qwen2ForCausalLM.packed_modules_mapping
    skipped = {
        suffix: is_layer_skipped(f"model.layers.1.{suffix}", config.ignored_layers, merged)
        for suffix in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert skipped == {
        "self_attn.qkv_proj": False,
        "self_attn.o_proj": False,
        "mlp.gate_up_proj": True,
        "mlp.down_proj": True,
    }
    assert is_layer_skipped("lm_head", config.ignored_layers, merged)
