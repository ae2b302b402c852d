# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of support about the machine and the model; test_refusals_on_cpu.py has those about settings."""

import ast
import json
from dataclasses import replace

import pyarrow.parquet
import pytest
import support_page
import torch
import transformers
from support_models import HYBRID, MIXTURE, MODEL_CONFIG, MODELS
from test_refusals_on_cpu import SENTENCE, changed
from torch import nn
from transformers import AutoModelForCausalLM

from jetrl_verl.config import environment, hopper_kernels, vllm_plugins
from jetrl_verl.config.composition import reader, resolve
from jetrl_verl.config.job import Job
from jetrl_verl.config.model import (
    ModelFiles,
    cache_message,
    check_kernels,
    check_model,
    check_models,
    check_prompt_cuts,
    check_ulysses,
    check_vocabulary,
    read_model,
)
from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.support import table
from jetrl_verl.config.support.machine import MACHINE_ROWS, MODEL_ROWS
from jetrl_verl.config.support.row import UnsupportedConfiguration, shown
from jetrl_verl.config.support.scopes import ACTOR, ATTENTION, AUTO, MODEL, ROLLOUT, SHARED, ULYSSES, VLLM
from jetrl_verl.config.support.table import COMPOSITION_ROWS, TABLE, refusal
from jetrl_verl.config.support.workers import COMMAND_ROWS, WORKER_ROWS
from jetrl_verl.formats.catalog import QUANTIZED_CACHES
from jetrl_verl.rollout.arguments import vllm_arguments
from jetrl_verl.sources import source_files
from jetrl_verl.tools.memory.shapes import KNOWN

(FP8,) = QUANTIZED_CACHES
OPTIONS = JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="shared")
STOCK = ("precision=jet_fp8", "jetrl.operations=stock")


def check(path: str, options: JetConfig = OPTIONS, ranks: int = 1) -> None:
    """Check the model at ``path`` for a job of ``options`` and a rollout of that many ranks."""
    check_model(Job(options, rollout_ranks=ranks), read_model(path))


def check_job(config) -> None:
    """The check of a job's models in the driver."""
    check_models(resolve(config), reader(config))


def refused(check, *args, **kwargs) -> str:
    """The sentence with which a check refuses."""
    with pytest.raises(UnsupportedConfiguration) as caught:
        check(*args, **kwargs)
    assert SENTENCE.fullmatch(str(caught.value))
    return str(caught.value)


def reason(message: str) -> str:
    return message.partition(": ")[2].partition(". Set ")[0]


SKIPPING = {"no_layer_fits": {"hidden_size": 192, "head_dim": 96, "intermediate_size": 576}}
ELSEWHERE = {
    *("version", "missing_package", "optimizer_package", "attention_package"),
    *("rollout_ranks_of_the_heads", "layer_shard_shape"),
    *("mixture_of_another_format", "mixture_with_stock_operations", "mixture_with_bf16_backward"),
    *("mixture_over_replicas", "npu", "rocm", "gpu_without_fp8", "gpu_other_than_hopper", "gpu_of_an_fp8_cache"),
    *("no_flash_attention_3", "tensor_of_the_bucket", "videos", "image_package"),
}
"""Rows that test_environment_on_cpu.py, test_attention_on_cpu.py, test_workers_on_cpu.py and
test_verl_overrides_on_cpu.py test."""
BELOW = {
    *("patch", "expert_shard_shape", "fused_kernels_of_a_padded_vocabulary", "ulysses_of_the_heads"),
    *("model_of_an_fp8_cache", "varlen_sliding_window", "varlen_dropout", "field_of_one_side", "models_own_code"),
    *("varlen_model", "vllm_plugins", "wrap_policy_of_a_tower", "delta_net_without_kernels", "page_of_states"),
    *("exact_images", "vision_tower", "images_of_text_models", "text_of_stock_operations"),
    "vision_package",
    *("linear_of_no_family", "another_decoder", "layer_without_scaling", "checkpoint_of_another_factor"),
    *("place_of_adapter", "kind_of_adapter"),
    *(name for name, entry in TABLE.items() if entry.scope is AUTO),
}


def test_each_row_about_the_machine_is_tested():
    assert {*MODELS, *SKIPPING, *ELSEWHERE, *BELOW} == {*MACHINE_ROWS, *MODEL_ROWS}


@pytest.mark.parametrize("name", [*MODELS, *SKIPPING])
def test_a_model_is_refused_by_its_row(model, name, capsys):
    stock = JetConfig("jet_fp8", train="fp8", rollout="fp8", unfit_layers="skip" if name in SKIPPING else "stop")
    shared = replace(stock, operations="shared")
    path, of_operations = model(), TABLE[name].scope is SHARED
    check(path, shared)
    model({**MODELS, **SKIPPING}[name])
    if of_operations:
        check(path, stock)
    message = refused(check, path, shared if of_operations else stock)
    assert message == refusal(name, precision="jet_fp8", what=f"the model {path}", why=reason(message))
    if of_operations:
        config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", f"{MODEL}.path": path})
        assert not resolve(config).shared and reason(message) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("place_of_adapter", {"target_modules": ["q_proj", "lm_head"]}, "an adapter of lm_head"),
        ("place_of_adapter", {"target_modules": ["embed_tokens"]}, "an adapter of model.embed_tokens"),
        ("kind_of_adapter", {"lora_dropout": 0.1}, "q_proj has a dropout"),
        ("kind_of_adapter", {"use_dora": True}, "a magnitude of its own"),
        ("kind_of_adapter", {"use_rslora": True}, "an r or a scale of its own"),
        ("kind_of_adapter", {"rank_pattern": {"q_proj": 4}}, "an r or a scale of its own"),
        ("kind_of_adapter", {"modules_to_save": ["lm_head"]}, "trains lm_head whole"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(model, tmp_path, name, settings, words):
    from peft import LoraConfig

    path, adapter = model(), str(tmp_path / "adapter")
    fields = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    job = (*STOCK, f"{MODEL}.path={path}", f"{MODEL}.lora_rank=8", f"{MODEL}.lora_adapter_path={adapter}")
    LoraConfig(**fields).save_pretrained(adapter)
    check_job(changed(job, {}))
    LoraConfig(**(fields | settings)).save_pretrained(adapter)
    message = refused(check_job, changed(job, {}))
    assert message == refusal(name, precision="jet_fp8", what=f"the model {path}", why=reason(message))
    assert words in message


def test_modules_of_adapters_that_the_model_lacks_are_refused(model):
    job = (*STOCK, f"{MODEL}.path={model()}", f"{MODEL}.lora_rank=8")
    for modules in ("all-linear", ["o_proj"], r".*\.up_proj"):
        check_job(changed(job, {f"{MODEL}.target_modules": modules}))
    with pytest.raises(UnsupportedConfiguration, match=r"cannot get its LoRA adapters \(Target modules .*qkv"):
        check_job(changed(job, {f"{MODEL}.target_modules": ["qkv"]}))
    with pytest.raises(UnsupportedConfiguration, match=r"/nope.*\. Set \S+\.lora_adapter_path to an adapter of"):
        check_job(changed(job, {f"{MODEL}.lora_adapter_path": "/nope"}))


def test_the_driver_needs_no_gpu_for_the_norm_of_fla(model, monkeypatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    placed, current = [], torch.cuda.current_device

    def norm(features, eps, activation, device, dtype):
        placed.append(device)
        return nn.RMSNorm(features, device=device)

    monkeypatch.setattr(modeling_qwen3_5, "FusedRMSNormGated", norm)
    check(model(HYBRID), replace(OPTIONS, operations="shared"))
    assert placed == ["meta"] and torch.cuda.current_device is current


def test_experts_that_fit_over_fewer_ranks_are_refused_with_their_number(model):
    path = model(MIXTURE | {"num_key_value_heads": 4, "moe_intermediate_size": 256})
    check(path, ranks=2)
    message = refused(check, path, ranks=4)
    assert message.startswith(f"the model {path} is not supported with precision=jet_fp8: ")
    remedy = "Set a smaller actor_rollout_ref.rollout.tensor_model_parallel_size, or precision=bf16."
    assert message.endswith(f", as they are over 2. {remedy}")


def test_a_fork_without_the_patched_function_is_refused(monkeypatch):
    from jetrl_verl import patches
    from jetrl_verl.patches.patch import CHANGED

    needed = next(patch for patch, _ in patches.installed_states() if patch.needed)
    monkeypatch.setattr(patches, "installed_states", lambda: [(needed, CHANGED)])
    message = refused(environment.check_patches, Job(OPTIONS))
    assert needed.replaces in message
    assert message.endswith(f" Set up {needed.pinned}, or precision=bf16.")


def test_delta_nets_without_the_hopper_kernels_are_refused(model, monkeypatch):
    path = model(HYBRID)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(hopper_kernels, "in_this_package", lambda: True)
    check_kernels(read_model(path))
    monkeypatch.setattr(hopper_kernels, "in_this_package", lambda: False)
    assert "`make wheel` builds a package with them" in refused(check_kernels, read_model(path))
    mixture = model({"model_type": "qwen3_5_moe"})  # which has no stock operations
    assert refused(check_kernels, read_model(mixture)).endswith(" Set precision=fp8_rollout, or precision=bf16.")
    check_kernels(read_model(model({})))


def test_fused_kernels_of_a_padded_vocabulary_are_refused(model, monkeypatch):
    from transformers import AutoTokenizer

    path = model()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: range(128))
    check_vocabulary(read_model(path))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: range(100))
    assert refused(check_vocabulary, read_model(path)) == (
        f"{MODEL}.use_fused_kernels=true is not supported with the 28 entries of its vocabulary that nothing samples: "
        f"{path} would leave them unmasked in the trainer alone. Set {MODEL}.use_fused_kernels=false."
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_dim": 64}, "its heads are of 64, and a scale is for 128"),
        (
            HYBRID | {"text_config": HYBRID["text_config"] | {"head_dim": 256}},
            "its heads are of 256, and a scale is for 128",
        ),
        (
            {"num_attention_heads": 32, "num_key_value_heads": 2},
            "a KV head has 16 query heads, and the kernel computes 8",
        ),
        (MODELS["sliding_window"], "its layers attend to windows"),
    ],
)
def test_an_fp8_cache_of_a_model_without_a_kernel_is_refused(model, changes, why):
    def message(changes) -> str:
        return cache_message(ModelFiles("a", None, read_model(model(changes)).config), FP8)

    assert message({}) == message({"num_attention_heads": 16}) == ""
    assert message(changes) == refusal("model_of_an_fp8_cache", what="the model a", why=why)


def test_a_wrap_policy_that_leaves_a_frozen_tower_among_trained_weights_is_refused(model):
    def job(changes, **fields):
        fields |= {"strategy": "fsdp", "fsdp_config.wrap_policy.min_num_params": 1000}
        return changed(STOCK, {f"{MODEL}.path": model(changes)} | {f"{ACTOR}.{k}": v for k, v in fields.items()})

    message = refused(check_job, job(HYBRID))
    assert message.startswith(f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=1000 is not supported with {ACTOR}.str")
    check_job(job({}))
    check_job(job(HYBRID, **{"fsdp_config.use_orig_params": True}))


def test_images_in_the_data_run_the_tower_and_turn_exactness_off(model, tmp_path, capsys, monkeypatch):
    file, only_text = tmp_path / "images.parquet", f"{VLLM}.language_model_only"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1"] * 2, "images": [[], [{"path": "a.png"}]]}), file)

    def job(*words: str, of=HYBRID, **fields):
        data = {f"data.{name}_files": str(file) for name in ("train", "val")}
        return changed(words or STOCK, data | {f"{MODEL}.path": model(of)} | fields)

    where = f"the column images of {file} (data.train_files)"
    images = resolve(job())
    assert images.images and not images.bit_equal and vllm_arguments(images, {})["language_model_only"] is False
    assert f"exactness is OFF: {where} (each side has its own vision tower); sequences" in capsys.readouterr().err
    message = refused(resolve, job("precision=jet_fp8_exact"))
    assert message == (
        f"{where} is not supported with precision=jet_fp8_exact: each side has its own vision tower. Set "
        "data.train_files and data.val_files to text, or precision=jet_fp8."
    )
    assert where in refused(resolve, job(**{only_text: True}))
    text = {"data.train_files": None, "data.val_files": None}
    assert not resolve(job(**text)).images and not resolve(job(**text, **{only_text: True})).images
    assert resolve(job(**text, **{only_text: False})).images
    assert "it has no vision tower" in refused(check_job, job(of={}))
    shared, of_sections = ("precision=jet_fp8", "jetrl.operations=shared"), KNOWN["qwen2.5-vl-7b"]
    monkeypatch.setattr(transformers.utils, "is_torchvision_available", lambda: False)
    for words in ({}, text):
        assert "without torchvision is not supported" in refused(check_job, job(*shared, of=of_sections, **words))
    assert "without torchvision is not supported" in refused(check_job, job())
    check_job(job(**text))
    monkeypatch.setattr(transformers.utils, "is_torchvision_available", lambda: True)
    check_job(job(of=of_sections))
    assert "stops at a micro-batch" in refused(check_job, job(of=of_sections, **text))
    check_job(job(*shared, of=of_sections, **text))


@pytest.mark.parametrize(
    ("name", "operations", "tokens"),
    [
        ("qwen3.5-4b", "stock", 528),
        ("qwen3.5-4b", "shared", 784),
        ("qwen3.5-27b", "shared", 1184),
        ("qwen3.5-35b-a3b", "shared", 1568),
    ],
)
def test_steps_of_fewer_tokens_than_a_page_of_states_are_refused(model, name, operations, tokens):
    files, key = read_model(model(KNOWN[name])), f"{ROLLOUT}.max_num_batched_tokens"

    def check_budget(budget: int, vllm: str = "0.24.0", prefixes: bool = True) -> None:
        config = changed(STOCK, {key: budget, f"{ROLLOUT}.enable_prefix_caching": prefixes})
        job = Job(replace(OPTIONS, operations=operations), versions={"vllm": vllm})
        check_prompt_cuts(job, files, reader(config))

    check_budget(tokens)
    check_budget(1, vllm="0.29.0")
    check_budget(1, prefixes=False)
    message = refused(check_budget, tokens - 1)
    assert f"has {tokens} tokens. Set {key}={tokens}, or {ROLLOUT}.enable_prefix_caching=false." in message


@pytest.mark.parametrize("key", ULYSSES)
def test_ulysses_ranks_that_do_not_divide_the_heads_are_refused(model, key):
    path = model({"num_attention_heads": 12, "num_key_value_heads": 2})
    for ranks in (1, 2, 4, 6, 12):
        check_ulysses(Job(OPTIONS), read_model(path), key, ranks)
    for ranks in (3, 5, 8):
        message = refused(check_job, changed(STOCK, {f"{MODEL}.path": path, key: ranks}))
        assert message.startswith(f"{key}={ranks} with the model {path} is not supported with precision=jet_fp8: ")
        assert "its 12 heads over 2 key heads" in message
    # Four ranks would share the key heads of the attention, and not those of the delta net.
    message = refused(check_job, changed(STOCK, {f"{MODEL}.path": model(HYBRID), key: 4}))
    assert "its 4 heads over 2 key heads and its delta net's 2 heads over 2 key heads are not divided" in message


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("varlen_sliding_window", MODELS["sliding_window"], ", whose layers attend to windows,"),
        ("varlen_dropout", MODELS["attention_dropout"], " with attention_dropout=0.1"),
        ("varlen_model", {"attention_chunk_size": 64}, " with attention_chunk_size=64"),
        ("varlen_model", {"head_dim": 384}, " with heads of 384"),
    ],
)
def test_a_model_that_varlen_attention_does_not_support_is_refused(model, name, changes, what):
    path = model(changes)
    settings = (*STOCK, f"+{ATTENTION}=jetrl_varlen")

    def check(*further: str) -> None:
        check_job(changed((*settings, *further), {f"{MODEL}.path": path}))

    assert refused(check) == refusal(name, what=f"the model {path}{what}")
    check(f"{ATTENTION}=sdpa")
    if name == "varlen_dropout":
        check(f"+{MODEL}.override_config.attention_dropout=0.0")
    model()
    check()


# --- one model on both sides ------------------------------------------------------------------------------------------

OVERRIDES = {
    "attention_bias": True,
    "head_dim": 256,
    "hidden_act": "gelu",
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 1,
    "rms_norm_eps": 0.05,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "vocab_size": 64,
    "a_field_of_the_future": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("node", ["override_config", "override_config.model_config"])
def test_what_the_trainers_model_overrides_the_rollouts_does(model, name, node):
    settings = {f"{MODEL}.path": model(), f"{MODEL}.{node}": {name: OVERRIDES[name], "attn_implementation": "sdpa"}}
    for words in (STOCK, ("precision=fp8_rollout",)):
        config = changed(words, settings)
        job = resolve(config)
        assert job == Job.of(config.jetrl) and job.overrides == {name: OVERRIDES[name]}
        assert vllm_arguments(job, None)["hf_overrides"].items() >= job.overrides.items()
        check_models(job, reader(config))
        same = changed(words, settings | {f"{VLLM}.hf_overrides": dict(job.overrides)})
        check_models(resolve(same), reader(same))


@pytest.mark.parametrize(("name", "value"), [*OVERRIDES.items(), ("rope_parameters", ROPE), ("rope_theta", 5e5)])
def test_what_the_rollouts_model_alone_overrides_is_refused(model, name, value):
    path = model()
    stated = read_model(path).config.get(name)
    message = refused(check_job, changed(STOCK, {f"{MODEL}.path": path, f"{VLLM}.hf_overrides": {name: value}}))
    own, sides = shown(value), f"{shown(stated)} in the trainer and {shown(value)} in the rollout"
    assert message.startswith(f"{VLLM}.hf_overrides.{name}={own} is not supported with precision=jet_fp8: {name} would")
    remedy = f"{name} in config.json of a copy of the model" if "rope" in name else f"{MODEL}.override_config.{name}"
    assert sides in message and f". Set {remedy}" in message
    contradiction = {f"{MODEL}.override_config": {name: stated}, f"{VLLM}.hf_overrides": {name: value}}
    if "rope" not in name:
        assert sides in refused(check_job, changed(STOCK, {f"{MODEL}.path": path, **contradiction}))
    check_job(changed(STOCK, {f"{MODEL}.path": path, f"{VLLM}.hf_overrides": {name: stated, "use_cache": False}}))


def test_a_configuration_from_another_folder_has_to_be_that_of_the_model(model, tmp_path):
    path, other = model(), tmp_path / "other"
    other.mkdir()
    settings = {f"{MODEL}.path": path, f"{MODEL}.hf_config_path": str(other)}
    for eps, same in ((1e-6, True), (1e-5, False)):
        (other / "config.json").write_text(json.dumps(MODEL_CONFIG | {"rms_norm_eps": eps, "use_cache": same}))
        if same:
            check_job(changed(STOCK, settings))
        else:
            message = refused(check_job, changed(STOCK, settings))
            assert message.startswith(f"{MODEL}.hf_config_path={other} is not supported with precision=jet_fp8: ")
            assert "rms_norm_eps would be 1e-05 in the trainer and 1e-06 in the rollout" in message


def test_a_models_own_code_is_refused_where_it_is_trusted(model):
    settings = {f"{MODEL}.path": model({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}})}
    check_job(changed(STOCK, settings))
    for node in (MODEL, VLLM):
        message = refused(check_job, changed(STOCK, settings | {f"{node}.trust_remote_code": True}))
        assert message.endswith(f". Set {MODEL}.trust_remote_code=false.")
    model({"auto_map": {"AutoTokenizer": ["tokenization.Own", None]}})
    check_job(changed(STOCK, settings | {f"{MODEL}.trust_remote_code": True}))


def _extra_linear(model) -> None:
    model.model.layers[1].mlp.add_module("extra_proj", nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("linear_of_no_family", _extra_linear, "its family has no linear layer model.layers.1.mlp.extra_proj"),
        (
            "another_decoder",
            lambda m: m.model.layers[1].add_module("after", nn.Identity()),
            "with model.layers.1.after",
        ),
        ("another_decoder", lambda m: m.lm_head.register_parameter("bias", m.model.norm.weight), "lm_head has a bias"),
        ("layer_without_scaling", lambda m: delattr(m.model.layers[1], "input_layernorm"), "has no input_layernorm"),
    ],
)
def test_a_layer_that_a_worker_would_refuse_is_refused_in_the_driver(model, monkeypatch, name, change, why, capsys):
    def changed_class(config):
        built = from_config(config)
        change(built)
        return built

    from_config, of_operations = AutoModelForCausalLM.from_config, name == "another_decoder"
    path = model()
    options = replace(OPTIONS, invariant_scaling=1.5) if name == "layer_without_scaling" else OPTIONS
    if not of_operations:
        options = replace(options, operations="stock")
    check(path, options)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", changed_class)
    message = refused(check, path, options)
    assert why in message and message == refusal(
        name, precision="jet_fp8", what=f"the model {path}", why=reason(message)
    )
    if of_operations:
        check(path, replace(options, operations="stock"))
        config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", f"{MODEL}.path": path})
        assert not resolve(config).shared and why in capsys.readouterr().err


def test_a_class_that_vllm_would_build_instead_is_refused(model):
    check(model({"architectures": ["Qwen3ForCausalLM"]}))
    message = refused(check, model({"architectures": ["Qwen3ForSequenceClassification"]}))
    assert "vLLM builds the architecture Qwen3ForSequenceClassification of its config.json" in message
    with pytest.raises(UnsupportedConfiguration, match=r"cannot be built from its configuration \(KeyError: 'nope'\)"):
        check(model({"hidden_act": "nope"}), replace(OPTIONS, operations="stock"))


def test_plugins_that_replace_layers_of_vllm_are_known_before_a_worker_starts(model, monkeypatch, capsys):
    """The program itself runs in tests/rollout."""
    path = model({"architectures": ["Qwen3ForCausalLM"]})
    config = {"jetrl.operations": "auto", f"{MODEL}.path": path}
    exact = changed(("precision=jet_fp8_exact",), {f"{MODEL}.path": path})
    assert vllm_plugins.other_plugins() == ()
    assert resolve(changed(("precision=jet_fp8",), config)).shared
    check_job(exact)
    asked = []
    monkeypatch.setattr(vllm_plugins, "other_plugins", lambda: ("ascend",))
    monkeypatch.setattr(vllm_plugins, "replaced", lambda name: asked.append(name) or ("the layer a.RMSNorm",))
    assert not resolve(changed(("precision=jet_fp8",), config)).shared
    assert "OFF: the layer a.RMSNorm (the plugins ascend of vLLM replaced it" in capsys.readouterr().err
    why = "the plugins ascend of vLLM replaced it, and what it computes is not known"
    assert refused(check_job, exact) == refusal("vllm_plugins", what="the layer a.RMSNorm", why=why)
    assert asked == ["Qwen3ForCausalLM"] * 2


# --- one table --------------------------------------------------------------------------------------------------------


WORDS = {None, "precision", "key", "value", "what", "scope", "why", "remedy"}
"""Arguments of ``refusal``; None stands for ``**words``."""


def test_code_refuses_by_existing_rows_and_uses_each():
    used, parts = set(), [rows for name, rows in vars(table).items() if name.endswith("_ROWS")]
    assert len(TABLE) + len(COMPOSITION_ROWS) == sum(map(len, parts))
    for name, path in source_files().items():
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            called = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
            place = {"refuse": 0, "refusal": 0, "UnsupportedLayer": 1, "UnsupportedOperation": 1}.get(called)
            if place is not None and not name.startswith("config/support/"):
                assert len(call.args) > place, f"{path}:{call.lineno} names no row"
                used |= {node.value for node in [call.args[place]] if isinstance(node, ast.Constant)}
                if place == 0:
                    assert {keyword.arg for keyword in call.keywords} <= WORDS, f"{path}:{call.lineno}"
    assert {*WORKER_ROWS, *COMMAND_ROWS} <= used <= TABLE.keys()


def test_the_page_of_support_is_generated_from_the_table():
    assert support_page.PAGE.read_text() == support_page.document(), "run python scripts/support_page.py"
