# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``precision=bf16_shared`` in a real vLLM on the CPU: vLLM's BF16 linears, shared operations, our sync and check. Each
side has its own GEMM, so log-probabilities are close to the trainer's but not equal."""

import pytest
import torch
import vllm_engine
from engine_inventory import PACKAGE, inventory
from streams import parts_of_model
from test_exact_rollout_on_cpu import SHAPE, build_policy
from vllm_engine import sync

from jetrl_verl import formats, kernels
from jetrl_verl.config.options import JetConfig
from jetrl_verl.sync.statement import ContractViolation
from jetrl_verl.train.shared_operations import share_operations

FAMILY = "qwen2"
"""Its linears have biases."""
LINEARS = formats.UNQUANTIZED
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def engine(tmp_path_factory, cpu_platform):
    """(vLLM, its worker)."""
    from jetrl_verl.patches import reloadable_weights_on_cpu

    reloadable_weights_on_cpu.KEEP_WEIGHT.apply()
    folder = tmp_path_factory.mktemp("model")
    build_policy(FAMILY, 0).to(torch.bfloat16).save_pretrained(folder)
    options = JetConfig("bf16_shared", train=LINEARS, rollout=LINEARS, operations="shared")
    with vllm_engine.cpu_settings():
        yield vllm_engine.start(folder, options, load_format="dummy", logprobs_mode="processed_logprobs")


def stream(seed: int, linears: str = LINEARS, operations: str = "shared", edit=None, **facts):
    """Stream of a trainer with linears of this format; ``edit`` changes tensors after their sums are taken."""
    model = build_policy(FAMILY, seed)
    share_operations(model)
    parts = parts_of_model(model, linears, operations, **facts)
    return [part._replace(tensor=edit(part.name, part.tensor.clone())) if edit else part for part in parts]


def test_the_engine_has_shared_operations_and_stock_linears(engine):
    _, worker = engine
    parts = inventory(worker)
    assert parts["worker"][0] == f"{PACKAGE}.rollout.worker.JetWorker"
    assert parts["quantization"] == f"{PACKAGE}.rollout.method.JetBF16Config"
    methods = parts["linear methods"]
    assert methods["vllm.model_executor.layers.linear.UnquantizedLinearMethod"] == 2 * 4
    assert not any(name.startswith(PACKAGE) for name in methods)
    shared = {name.rpartition(".")[2] for name in parts["modules"] if name.startswith(PACKAGE)}
    assert shared == {"SharedRMSNorm", "SharedSiluAndMul", "SharedRotaryEmbedding", "SharedLogitsProcessor"}
    assert parts["attention"] == {f"{PACKAGE}.rollout.cpu_attention.SharedCPUAttention": 2}
    assert parts["sampler"] == f"{PACKAGE}.rollout.sampler.SharedSampler"
    # No layer reads qdata, so norms and activations do not quantize.
    rules = [module.reader_rule for module in worker.get_model().modules() if hasattr(module, "reader_rule")]
    assert len(rules) == 2 * 3 + 1 and set(rules) == {None}


def test_the_stream_is_bf16_and_log_probabilities_are_close_to_the_trainers(engine):
    llm, worker = engine
    sent = stream(1)
    assert {part.tensor.dtype for part in sent} == {torch.bfloat16, torch.int64, torch.uint8}
    sync(worker, sent)
    prompt = torch.randint(0, SHAPE["vocab_size"], (48,), generator=torch.Generator().manual_seed(0)).tolist()
    rollout = vllm_engine.prompt_log_probs(llm, prompt)

    def trainer(shared: bool) -> torch.Tensor:
        model = build_policy(FAMILY, 1)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        if shared:
            share_operations(model)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].float()
        return kernels.log_probs(logits, torch.tensor(prompt[1:])[:, None], torch.ones(len(prompt) - 1))[:, 0]

    shared_error, stock_error = ((trainer(shared) - rollout).square().mean() for shared in (True, False))
    assert shared_error < stock_error / 2


def flipped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name == "model.layers.1.mlp.up_proj.weight":
        tensor.view(torch.int16)[7, 11] ^= 1
    return tensor


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(edit=flipped), r"up_proj\.weight differs between trainer and rollout in 1 of 384"),
        (dict(operations="stock"), "add_rms_norm, .* of the shared operations differ between trainer and rollout"),
    ],
    ids=["a bit of a BF16 weight", "stock operations"],
)
def test_a_weight_or_operation_that_differs_is_named(engine, changes, sentence):
    with pytest.raises(ContractViolation, match=sentence):
        sync(engine[1], stream(2, **changes))


def test_qdata_cannot_be_loaded_by_an_engine_without_a_format(engine):
    with pytest.raises(RuntimeError, match="could not load the weights"):
        sync(engine[1], stream(3, linears=formats.FLOW))


def test_a_probe_on_one_side_alone_is_refused(engine):
    with pytest.raises(ContractViolation, match="gives 0x1 in the trainer, none in the rollout"):
        sync(engine[1], stream(4, probe=1))
