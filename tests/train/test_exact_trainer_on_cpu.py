# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The stock Hugging Face model with the shared operations: right gradients, one result per sequence in every batch.
Equality with vLLM is tested in tests/rollout/test_exact_rollout_on_cpu.py."""

from functools import partial

import pytest
import torch
from tiny_models import (
    ALL,
    WITH_TOWER,
    packed,
    padded,
    sequences_of,
    tiny_config,
    tiny_model,
    with_image,
    with_preferences,
)
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

from jetrl_verl import kernels
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.models import UnsupportedOperation
from jetrl_verl.models import family as model_family
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.train.packing import Packing
from jetrl_verl.train.shared_operations import ATTENTION, TokenNumbers, share_operations

LENGTHS = (7, 1, 40, 23)
CHANGES = {"mistral": dict(sliding_window=None)}


def bf16(model):
    """BF16 parameters, as FSDP shows them to a forward; buffers keep their type."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def stock(family: str, seed: int = 0):
    return bf16(tiny_model(family, seed, **CHANGES.get(family, {})))


def shared(family: str, seed: int = 0, fp8: bool = True, images: bool = False):
    model = stock(family, seed)
    if fp8:
        replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    share_operations(model, images=images)
    return model


tokens = partial(sequences_of, LENGTHS)


@torch.no_grad()
def logits_and_experts(model, *batches: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of real tokens and each one's experts in all layers, ascending; none if dense."""
    chosen, results = [], []
    mixtures = [module for name, module in model.named_modules() if name.endswith("mlp.experts")]
    hooks = [m.register_forward_pre_hook(lambda _, call: chosen.append(call[1].sort(dim=-1).values)) for m in mixtures]
    for inputs in batches:
        chosen.clear()
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        logits = model(**inputs, use_cache=False).logits[real]
        results.append((logits, torch.cat([logits.new_zeros(real.numel(), 0).long(), *chosen], dim=1)[real.flatten()]))
    for hook in hooks:
        hook.remove()
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


@pytest.mark.parametrize("family", ALL)
def test_logits_are_close_to_the_stock_model(family):
    """With fewer roundings, error against stock FP32 is smaller than that of stock BF16. Tokens that rounding sends to
    other experts are left out: one of them would outweigh all others."""
    inputs = padded(tokens())
    exact, experts = logits_and_experts(stock(family).float(), inputs)
    rounded, experts_of_rounded = logits_and_experts(stock(family), inputs)
    logits, experts_of_shared = logits_and_experts(shared(family, fp8=False), inputs)
    assert logits.dtype == torch.float32
    alike = ((experts == experts_of_rounded) & (experts == experts_of_shared)).all(dim=1)
    assert alike.float().mean() > 0.9
    exact, rounded, logits = (x[alike].float() for x in (exact, rounded, logits))
    assert (logits - exact).norm() < (rounded - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_close_to_the_stock_model(family, checkpointing):
    """Tokens that rounding sends to other experts are left out here too."""
    rows = tokens()
    following = torch.cat(rows).roll(-1)[:, None]
    # A stock delta net does not see where packed sequences begin.
    alone, together = [packed([row]) for row in rows], [packed(rows)]
    model = shared(family, fp8=False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    cases = (model, together), (stock(family).float(), alone), (stock(family), alone)
    experts = torch.stack([logits_and_experts(model, *batches)[1] for model, batches in cases])
    alike = (experts == experts[0]).all(dim=2).all(dim=0)
    assert alike.float().mean() > 0.9

    def gradients(model, batches) -> dict[str, torch.Tensor]:
        logits = torch.cat([model(**inputs, use_cache=False).logits[0] for inputs in batches]).float()
        kernels.log_probs(logits, following, torch.ones(len(following)))[alike].sum().backward()
        # Text gives a vision tower none.
        return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    shared_operations, exact, rounded = (gradients(*case) for case in cases)
    assert shared_operations.keys() == exact.keys()
    for name, gradient in exact.items():
        # A few parameters have a small error in stock BF16 by chance, above all the two numbers of a decay.
        chance = 5e-2 if gradient.numel() == 2 else 1e-3
        bound = 1.5 * (rounded[name] - gradient).norm() + chance * gradient.norm()
        assert (shared_operations[name] - gradient).norm() < bound, name


@pytest.mark.parametrize("first", ["checkpointing", "sharing"])
def test_keys_and_values_of_a_checkpointed_layer_are_not_kept_in_fp8(first, monkeypatch):
    """They would be written twice and read once within one layer. In evaluation they are kept."""
    model = stock("qwen3")
    steps = [
        lambda: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}),
        lambda: share_operations(model, "fp8"),
    ]
    for step in steps if first == "checkpointing" else reversed(steps):
        step()
    attend, calls = kernels.attention_fp8, []

    def recording(*call, keep_fp8):
        calls.append(keep_fp8)
        return attend(*call, keep_fp8=keep_fp8)

    monkeypatch.setattr(kernels, "attention_fp8", recording)
    layers = model.config.num_hidden_layers
    for training, expected in ((True, [False] * 2 * layers), (False, [True] * layers)):
        model.train(training)
        calls.clear()
        model(**packed(tokens()), use_cache=False).logits.float().logsumexp(-1).sum().backward()
        assert calls == expected


@pytest.mark.parametrize("family", ALL)
def test_a_sequence_has_one_result_in_every_batch(family):
    """Padded, packed, alone, with a gradient, checkpointed, under autocast: the same bits."""
    model, sequences = shared(family), tokens()
    with torch.no_grad():
        alone = [model(input_ids=s[None], use_cache=False).logits[0] for s in sequences]
        rows = model(**padded(sequences)).logits
        assert all(torch.equal(rows[i, : len(s)], alone[i]) for i, s in enumerate(sequences))
        assert torch.equal(model(**packed(sequences)).logits[0], torch.cat(alone))
        assert torch.equal(model(**packed(sequences[::-1])).logits[0], torch.cat(alone[::-1]))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = model(**packed(sequences), use_cache=False).logits[0]
    assert trained.requires_grad and torch.equal(trained.detach(), torch.cat(alone))


@pytest.mark.parametrize("family", WITH_TOWER)
def test_images_are_close_to_the_stock_model(family):
    """Features of the tower, deepstack's and mRoPE's angles; the error is bounded as that of text above."""

    def states(model) -> torch.Tensor:
        inputs = with_image(model, tokens()[2].clamp(max=59).tolist())
        with torch.no_grad():
            return model.model(**inputs, use_cache=False).last_hidden_state.float()

    exact, rounded = states(stock(family).float()), states(stock(family))
    assert (
        (states(shared(family, fp8=False, images=True)) - exact).norm()
        < 1.1 * (rounded - exact).norm()
        < 0.1 * exact.norm()
    )


@pytest.mark.parametrize("family", WITH_TOWER)
def test_text_next_to_an_image_is_that_of_a_model_without_images(family):
    """Padded, packed and alone: the rows of text have its bits, and a pass without an image has a gradient of 0 for the
    tower."""
    model, with_images, text = shared(family), shared(family, images=True), tokens()[2].clamp(max=59)
    numbers = TokenNumbers(("logits",), None, lambda logits, _: [logits])

    def logits(model, inputs):
        return model(**inputs, token_numbers=numbers, use_cache=False).logits[0]

    with torch.no_grad():
        expected = logits(model, packed([text]))
    alone = logits(with_images, packed([text]))
    assert torch.equal(alone, expected)
    alone.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for n, p in with_images.named_parameters() if "visual" in n)
    image = with_image(with_images, text.tolist())
    rows = torch.arange(len(text)).expand(4, 1, -1)
    together = image | dict(
        input_ids=torch.cat([text[None], image["input_ids"]], dim=1),
        position_ids=torch.cat([rows, image["position_ids"]], dim=2),
    )
    with torch.no_grad():
        assert torch.equal(logits(with_images, together)[: len(text)], expected)
        assert torch.equal(logits(with_images, together)[len(text) :], logits(with_images, image))


def test_positions_of_text_in_mrope_are_its_positions():
    """verl's rows of a processor's sample: text, time, height and width; an image's differ."""
    model, inputs = shared("qwen3"), packed(tokens())
    with torch.no_grad():
        expected = model(**inputs).logits
        positions = inputs.pop("position_ids").expand(4, 1, -1).clone()
        assert torch.equal(model(**inputs, position_ids=positions).logits, expected)
        positions[2, 0, -1] += 1
        with pytest.raises(UnsupportedConfiguration, match="positions of an image or video is not supported with"):
            model(**inputs, position_ids=positions)
        with pytest.raises(UnsupportedConfiguration, match="an image or video is not supported with .* Set .actor"):
            model(**inputs, pixel_values=None, token_numbers=True)


def test_no_mask_is_built():
    config, positions = shared("qwen3").config, packed(tokens())["position_ids"]
    arguments = dict(
        inputs_embeds=torch.zeros(1, positions.shape[1], 8),
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    assert create_causal_mask(tiny_config("qwen3", attn_implementation="sdpa"), **arguments) is not None
    assert create_causal_mask(config, **arguments) is None


def test_verl_saves_a_folder_that_stock_hugging_face_loads(one_process_group, cpu_platform, tmp_path):
    """``hf_model`` in ``checkpoint.save_contents``, written by verl from the live configuration."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    model = tiny_model("qwen3", architectures=["Qwen3ForCausalLM"])
    replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    share_operations(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    contents = dict(save_contents=["model", "optimizer", "extra", "hf_model"], load_contents=["model"])
    manager = FSDPCheckpointManager(
        model, torch.optim.AdamW(model.parameters()), None, None, checkpoint_config=contents
    )
    manager.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    assert model.config._attn_implementation == ATTENTION, "the trainer keeps its attention"

    folder = tmp_path / "actor" / "huggingface"
    assert all("jetrl" not in file.read_text() for file in folder.glob("*.json"))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loaded.config._attn_implementation == "sdpa"
    after = loaded.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert loaded(**padded(tokens())).logits.isfinite().all()
    with pytest.raises(RuntimeError, match="can be saved but not run. Load the saved folder"):
        AutoModelForCausalLM.from_config(model.config)(**packed(tokens()))


def test_packing_reads_sequences_from_masks_and_from_positions():
    sequences = tokens()
    by_mask = Packing.of(padded(sequences)["position_ids"], padded(sequences)["attention_mask"])
    by_position = Packing.of(packed(sequences)["position_ids"], None)
    for packing in (by_mask, by_position):
        assert packing.cu_seqlens.tolist() == [0, 7, 8, 48, 71] and packing.max_seqlen == 40
        assert packing.cu_seqlens.dtype == torch.int32
    assert by_position.tokens is None and len(by_mask.tokens) == 71
    two_rows = Packing.of(torch.arange(5).expand(2, 5) + 3, None)
    assert two_rows.cu_seqlens.tolist() == [0, 5, 10]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(head_dim=96), "do not cover heads of 96"),
        (dict(hidden_act="gelu"), "do not cover the activation gelu"),
        (dict(attention_dropout=0.1), "do not cover attention dropout"),
        (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)), "do not cover rope_type=yarn"),
        (
            dict(use_sliding_window=True, sliding_window=16, max_window_layers=1),
            "do not cover sliding window attention",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_model_that_the_operations_do_not_cover_is_refused(changes, sentence):
    config = tiny_config("qwen3", **changes)
    for form in (config, config.to_dict()):
        with pytest.raises(UnsupportedOperation, match=sentence):
            model_family({"model_type": "qwen3"}).check_operations(form)
    with pytest.raises(UnsupportedOperation, match=sentence):
        share_operations(tiny_model("qwen3", **changes))


def test_layers_left_out_of_fp8_get_bf16_inputs():
    """``jetrl.unfit_layers=skip``: norm and activation do not quantize for such a layer, in training either."""
    changes = dict(intermediate_size=320)
    inputs, following = packed(tokens()), packed(tokens())["input_ids"][0].roll(-1)[:, None]

    def gradients(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = model(**inputs, use_cache=False).logits[0].float()
        kernels.log_probs(logits, following, torch.ones(len(following))).sum().backward()
        return logits.detach(), {name: p.grad.double() for name, p in model.named_parameters()}

    def skipping():
        model = bf16(tiny_model("qwen3", **changes))
        assert len(replace_linears(model, plan_linears(model.config, unfit_layers="skip"), scale_rule="fp32")) == 2 * 4
        return model

    shared_model = skipping()
    share_operations(shared_model)
    (logits, gradients_of_shared), (exact, exact_gradients) = (
        gradients(shared_model),
        gradients(bf16(tiny_model("qwen3", **changes)).float()),
    )
    rounded, stock_operations = gradients(skipping())
    assert (logits - exact).norm() < 1.1 * (rounded - exact).norm() < 0.1 * exact.norm()
    for name, gradient in exact_gradients.items():
        error = (stock_operations[name] - gradient).norm()
        assert (gradients_of_shared[name] - gradient).norm() < 1.5 * error + 1e-3 * gradient.norm(), name


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model: delattr(model.model.layers[1], "post_attention_layernorm"), "without model.layers.1.post_att"),
        (lambda model: model.model.layers[1].add_module("after", nn.Identity()), "with model.layers.1.after"),
        (lambda model: setattr(model.model.layers[0].mlp, "norm", nn.RMSNorm(8)), "with model.layers.0.mlp.norm"),
        (lambda model: setattr(model.model, "extra", nn.Linear(2, 2)), "with model.extra"),
    ],
)
def test_a_module_that_the_family_does_not_have_is_named(change, what):
    model = tiny_model("llama")
    change(model)
    with pytest.raises(UnsupportedOperation, match=f"it is a LlamaForCausalLM {what}"):
        share_operations(model)


def test_generation_and_positional_arguments_are_refused():
    model = shared("qwen3")
    with pytest.raises(ValueError, match="does not generate; pass use_cache=False"):
        model(input_ids=tokens()[0][None], use_cache=True)
    with pytest.raises(TypeError, match="keyword arguments"):
        model.model(tokens()[0][None])


@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engines_log_probabilities_are_the_shared_functions(cpu_platform, remove_padding, temperature):
    """With verl's own preparation of a micro-batch, padded and packed."""
    from verl.utils import tensordict_utils

    from jetrl_verl.config.engine_config import JetFSDPEngineConfig
    from jetrl_verl.config.job import Job
    from jetrl_verl.config.options import JetConfig
    from jetrl_verl.train.engine import JetFSDPEngine
    from jetrl_verl.train.token_numbers import SharedOperations

    engine = object.__new__(JetFSDPEngine)
    options = JetConfig("jet_fp8_exact", train="fp8", rollout="fp8", operations="shared")
    engine.engine_config = JetFSDPEngineConfig(jetrl=Job(options))
    engine.pad_to_length, engine.pad_to_length_bucket, engine.use_ulysses_sp = remove_padding, 16, False
    engine.compute_entropy_from_logits = lambda logits: torch.distributions.Categorical(logits=logits).entropy()
    sequences = tokens()
    jagged = [
        torch.nested.as_nested_tensor(x, layout=torch.jagged) for x in (sequences, list(map(torch.arange, LENGTHS)))
    ]
    micro_batch = tensordict_utils.get_tensordict(
        {"input_ids": jagged[0], "position_ids": jagged[1]},
        dict(use_remove_padding=remove_padding, temperature=temperature, calculate_entropy=True, pad_token_id=0),
    )
    model = shared("qwen3")
    engine._features = (SharedOperations(engine),)
    with torch.no_grad():
        inputs, arguments = engine.prepare_model_inputs(micro_batch)
        outputs = engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, micro_batch, None)
        for i, sequence in enumerate(sequences):
            logits = model(input_ids=sequence[None], use_cache=False).logits[0]
            expected = kernels.log_probs(logits[:-1], sequence[1:, None], torch.full((len(sequence) - 1,), temperature))
            assert torch.equal(outputs["log_probs"].unbind()[i][:-1], expected[:, 0])
            entropy = torch.distributions.Categorical(logits=logits / temperature).entropy()
            assert torch.allclose(outputs["entropy"].unbind()[i], entropy, atol=1e-5)


IDS = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def routed():
    """A two-layer mixture in the flow, with shared operations, in BF16 as FSDP shows it to a forward."""
    model = with_preferences(tiny_model("qwen3_moe", 4)).to(torch.bfloat16)
    replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    share_operations(model)
    return model


def balance(logits: list[torch.Tensor], experts: int, k: int) -> torch.Tensor:
    """Switch's loss (arXiv 2101.03961, equations 4 to 6) over all layers' tokens: E times the sum over experts of
    the share of pairs times the mean probability, in FP64."""
    probabilities = torch.cat([rows.double() for rows in logits]).softmax(dim=-1)
    chosen = torch.cat([rows.detach() for rows in logits]).topk(k, dim=-1).indices
    shares = torch.nn.functional.one_hot(chosen, experts).double().mean(dim=0)
    return experts * (shares * probabilities.mean(dim=0)).sum()


def test_the_load_balancing_loss_is_that_of_the_routers_logits(routed):
    outputs = routed(input_ids=IDS, output_router_logits=True)
    assert [tuple(logits.shape) for logits in outputs.router_logits] == [(80, 8)] * 2
    assert all(logits.dtype == torch.float32 for logits in outputs.router_logits)
    expected = balance(list(outputs.router_logits), 8, 2)
    assert abs(outputs.aux_loss.double() - expected) < 1e-6 * expected


def test_the_load_balancing_gradient_is_that_of_fp64(routed):
    """Of the last layer's router, where it depends on the loss and the router's input alone."""
    outputs = routed(input_ids=IDS, output_router_logits=True)
    outputs.aux_loss.backward()
    router = routed.model.layers[-1].mlp.gate.weight
    seen = []
    routed.model.layers[-1].mlp.gate.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        routed(input_ids=IDS)
    weight = router.detach().double().requires_grad_()
    logits = [logits.detach() for logits in outputs.router_logits[:-1]] + [seen[0].double() @ weight.t()]
    balance(logits, 8, 2).backward()
    assert weight.grad.norm() > 0
    # The gradient is a BF16 tensor.
    assert (router.grad.double() - weight.grad).norm() < 2**-7 * weight.grad.norm()
