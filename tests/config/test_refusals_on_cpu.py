# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations that a precision does not support: each is refused at composition, in the words a user will read."""

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from jetrl_verl.config import JetConfig, UnsupportedConfiguration, check_config

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"

# overrides -> what is not supported, as the user types it, and what to set
REFUSED = [
    (["model_engine=megatron"], f"{ACTOR}.strategy=megatron", f"model_engine=dp, or {ACTOR}.strategy=fsdp2."),
    (["model_engine=veomni"], f"{ACTOR}.strategy=veomni", f"model_engine=dp, or {ACTOR}.strategy=fsdp2."),
    (["model_engine=torchtitan"], f"{ACTOR}.strategy=torchtitan", f"model_engine=dp, or {ACTOR}.strategy=fsdp2."),
    ([f"{ACTOR}.strategy=fsdp_turbo"], f"{ACTOR}.strategy=fsdp_turbo", "model_engine=dp"),
    ([f"{ACTOR}.strategy=automodel"], f"{ACTOR}.strategy=automodel", "model_engine=dp"),
    ([f"{REF}.strategy=megatron"], f"{REF}.strategy=megatron", f"model_engine=dp, or {REF}.strategy=fsdp2."),
    (
        ["jetrl.critic=fp8", "critic.strategy=megatron"],
        "critic.strategy=megatron",
        "model_engine=dp, or critic.strategy=fsdp2.",
    ),
    ([f"{ROLLOUT}.name=sglang"], f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.name=vllm, or precision=bf16."),
    ([f"{ROLLOUT}.name=trtllm"], f"{ROLLOUT}.name=trtllm", f"{ROLLOUT}.name=vllm, or precision=bf16."),
    ([f"{ROLLOUT}.name=hf"], f"{ROLLOUT}.name=hf", f"{ROLLOUT}.name=vllm, or precision=bf16."),
    ([f"{MODEL}.lora_rank=32"], f"{MODEL}.lora_rank=32", f"{MODEL}.lora_rank=0, or precision=bf16."),
    ([f"{MODEL}.lora.rank=32"], f"{MODEL}.lora.rank=32", f"{MODEL}.lora.rank=0, or precision=bf16."),
    ([f"{MODEL}.lora_adapter_path=/a"], f"{MODEL}.lora_adapter_path=/a", f"{MODEL}.lora_adapter_path=null"),
    ([f"{MODEL}.lora.adapter_path=/a"], f"{MODEL}.lora.adapter_path=/a", f"{MODEL}.lora.adapter_path=null"),
    ([f"{MODEL}.mtp.enable=true"], f"{MODEL}.mtp.enable=true", f"{MODEL}.mtp.enable=false, or precision=bf16."),
    ([f"{ACTOR}.qat.enable=true"], f"{ACTOR}.qat.enable=true", f"{ACTOR}.qat.enable=false."),
    (
        [f"{ACTOR}.fsdp_config.qat.enable=true"],
        f"{ACTOR}.fsdp_config.qat.enable=true",
        f"{ACTOR}.fsdp_config.qat.enable=false.",
    ),
    ([f"{ROLLOUT}.qat={{enable:true}}"], f"{ROLLOUT}.qat.enable=true", f"{ROLLOUT}.qat.enable=false."),
    (
        [f"{ACTOR}.fsdp_config.dtype=float16"],
        f"{ACTOR}.fsdp_config.dtype=float16",
        f"{ACTOR}.fsdp_config.dtype=bfloat16.",
    ),
    (
        [f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16"],
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bfloat16.",
    ),
    (
        [f"{ACTOR}.fsdp_config.model_dtype=fp16"],
        f"{ACTOR}.fsdp_config.model_dtype=fp16",
        f"{ACTOR}.fsdp_config.model_dtype=fp32.",
    ),
    ([f"{ROLLOUT}.quantization=fp8"], f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.quantization=null, or precision=bf16"),
    (
        [f"{ROLLOUT}.quantization_config_file=q.json"],
        f"{ROLLOUT}.quantization_config_file=q.json",
        f"{ROLLOUT}.quantization_config_file=null",
    ),
    ([f"+{VLLM}.quantization=fp8"], f"{VLLM}.quantization", f"{VLLM}.quantization=null, or precision=bf16."),
    (
        [f"+{VLLM}.hf_overrides.quantization_config.quant_method=fp8"],
        f"{VLLM}.hf_overrides.quantization_config",
        f"{VLLM}.hf_overrides.quantization_config=null, or precision=bf16.",
    ),
    (
        [f"+{VLLM}.worker_extension_cls=my.Extension"],
        f"{VLLM}.worker_extension_cls",
        f"{VLLM}.worker_extension_cls=null, or precision=bf16.",
    ),
    ([f"+{VLLM}.hf_overrides=nonsense"], f"{VLLM}.hf_overrides=nonsense", f"{VLLM}.hf_overrides to a mapping"),
    ([f"+{VLLM}.dtype=float16"], f"{VLLM}.dtype=float16", f"{VLLM}.dtype=bfloat16."),
    ([f"+{VLLM}.load_format=safetensors"], f"{VLLM}.load_format=safetensors", f"{VLLM}.load_format=dummy."),
    ([f"+{VLLM}.pipeline_parallel_size=2"], f"{VLLM}.pipeline_parallel_size=2", f"{VLLM}.pipeline_parallel_size=1."),
    (
        [f"+{VLLM}.enable_expert_parallel=true"],
        f"{VLLM}.enable_expert_parallel=true",
        f"{VLLM}.enable_expert_parallel=false.",
    ),
    ([f"+{VLLM}.kv_cache_dtype=fp8"], f"{VLLM}.kv_cache_dtype=fp8", f"{VLLM}.kv_cache_dtype=auto."),
    (
        [f"+{VLLM}.tensor_parallel_size=4"],
        f"{VLLM}.tensor_parallel_size=4",
        f"{ROLLOUT}.tensor_model_parallel_size=4.",
    ),
    ([f"{ROLLOUT}.dtype=float16"], f"{ROLLOUT}.dtype=float16", f"{ROLLOUT}.dtype=bfloat16."),
    ([f"{ROLLOUT}.load_format=auto"], f"{ROLLOUT}.load_format=auto", f"{ROLLOUT}.load_format=dummy."),
    (
        [f"{ROLLOUT}.pipeline_model_parallel_size=2"],
        f"{ROLLOUT}.pipeline_model_parallel_size=2",
        f"{ROLLOUT}.pipeline_model_parallel_size=1.",
    ),
    (
        [f"{ROLLOUT}.expert_parallel_size=2"],
        f"{ROLLOUT}.expert_parallel_size=2",
        f"{ROLLOUT}.expert_parallel_size=1.",
    ),
    (
        [f"+{VLLM}.enable_return_routed_experts=true"],
        f"{VLLM}.enable_return_routed_experts=true",
        f"{VLLM}.enable_return_routed_experts=false.",
    ),
    *(
        ([f"+{node}.router_replay.mode=R3"], f"{node}.router_replay.mode=R3", f"{node}.router_replay.mode=disabled.")
        for node in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", ACTOR)
    ),
    (
        [f"{ROLLOUT}.enable_rollout_routing_replay=true"],
        f"{ROLLOUT}.enable_rollout_routing_replay=true",
        f"{ROLLOUT}.enable_rollout_routing_replay=false.",
    ),
    (
        [f"{ROLLOUT}.disaggregation.enabled=true"],
        f"{ROLLOUT}.disaggregation.enabled=true",
        f"{ROLLOUT}.disaggregation.enabled=false.",
    ),
    (
        [f"{ROLLOUT}.checkpoint_engine.backend=nccl"],
        f"{ROLLOUT}.checkpoint_engine.backend=nccl",
        f"{ROLLOUT}.checkpoint_engine.backend=naive.",
    ),
    (
        [f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded"],
        f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded",
        f"{ROLLOUT}.checkpoint_engine.backend=naive.",
    ),
    (
        [f"+{ROLLOUT}.checkpoint_manager_class=my.Manager"],
        f"{ROLLOUT}.checkpoint_manager_class=my.Manager",
        f"{ROLLOUT}.checkpoint_manager_class=null.",
    ),
    ([f"{ROLLOUT}.nnodes=1"], f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.nnodes=0."),
    (
        ["actor_rollout_ref.hybrid_engine=false"],
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.hybrid_engine=true.",
    ),
    (
        ["trainer.v1.trainer_mode=separate_async"],
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.trainer_mode=sync.",
    ),
    (["trainer.use_v1=false"], "trainer.use_v1=false", "trainer.use_v1=true."),
    (["trainer.use_v1=0"], "trainer.use_v1=0", "trainer.use_v1=true."),
    (["trainer.device=npu"], "trainer.device=npu", "trainer.device=cuda, or precision=bf16."),
    (
        [f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig"],
        f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig",
        f"{ACTOR}.fsdp_config._target_=jetrl_verl.targets.configs.JetWorkerEngineConfig.",
    ),
    (
        [f"{ROLLOUT}._target_=verl.workers.config.RolloutConfig"],
        f"{ROLLOUT}._target_=verl.workers.config.RolloutConfig",
        f"{ROLLOUT}._target_=jetrl_verl.targets.configs.JetRolloutConfig.",
    ),
    (
        ["critic.fsdp._target_=verl.workers.config.FSDPEngineConfig"],
        "critic.fsdp._target_=verl.workers.config.FSDPEngineConfig",
        "critic.fsdp._target_=jetrl_verl.targets.configs.JetWorkerEngineConfig.",
    ),
    ([f"{ROLLOUT}.custom=null"], f"{ROLLOUT}.custom.jetrl=null", f"{ROLLOUT}.custom.jetrl=${{jetrl}}."),
    (
        [f"{ACTOR}.fsdp_config.jetrl=null"],
        f"{ACTOR}.fsdp_config.jetrl=null",
        f"{ACTOR}.fsdp_config.jetrl=${{jetrl}}.",
    ),
    (["jetrl.scale_rule=ue8m0"], "jetrl.scale_rule=ue8m0", "jetrl.scale_rule to one of fp32, pow2."),
    (["jetrl.contract_check=1"], "jetrl.contract_check=1", "jetrl.contract_check to one of true, false."),
    (["jetrl.unfit_layers=ignore"], "jetrl.unfit_layers=ignore", "jetrl.unfit_layers to one of stop, skip."),
    (["jetrl.train=bf16"], "jetrl.train=bf16", "precision=fp8_rollout."),
    (["jetrl.precision=fp8_rollout"], "jetrl.train=fp8", "precision=jet_fp8."),
    (
        [f"{ROLLOUT}.calculate_log_probs=false", "algorithm.rollout_correction.rollout_is=token"],
        "algorithm.rollout_correction.rollout_is=token",
        f"{ROLLOUT}.calculate_log_probs=true.",
    ),
    (
        [f"{ROLLOUT}.calculate_log_probs=false", "algorithm.rollout_correction.rollout_rs=token_k1"],
        "algorithm.rollout_correction.rollout_rs=token_k1",
        f"{ROLLOUT}.calculate_log_probs=true.",
    ),
    ([f"+{VLLM}.enable_lora=true"], f"{VLLM}.enable_lora=true", f"{VLLM}.enable_lora=false."),
    (
        [f"+{VLLM}.speculative_config={{method:ngram}}"],
        f"{VLLM}.speculative_config={{'method': 'ngram'}}",
        f"{VLLM}.speculative_config=null.",
    ),
    ([f"+{REF}.qat.enable=true"], f"{REF}.qat.enable=true", f"{REF}.qat.enable=false."),
    ([f"{REF}.fsdp_config.dtype=float16"], f"{REF}.fsdp_config.dtype=float16", f"{REF}.fsdp_config.dtype=bfloat16."),
    (
        [f"{REF}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig"],
        f"{REF}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig",
        f"{REF}.fsdp_config._target_=jetrl_verl",
    ),
    ([f"{REF}.fsdp_config.jetrl=null"], f"{REF}.fsdp_config.jetrl=null", f"{REF}.fsdp_config.jetrl=${{jetrl}}."),
    (["critic.fsdp.jetrl=null"], "critic.fsdp.jetrl=null", "critic.fsdp.jetrl=${jetrl}."),
    (["jetrl.rollout=bf16"], "jetrl.rollout=bf16", "jetrl.rollout=fp8."),
    (["jetrl.train=bf16", "jetrl.rollout=bf16"], "jetrl.rollout=bf16", "precision=bf16, or precision=bf16_shared,"),
    (["+jetrl.scales=fp32"], "jetrl.scales", "one of precision, train, rollout, scale_rule"),
]


def check_shape(message: str, what: str, remedy: str) -> None:
    """One shape: ``X is not supported with Y: why. Set Z.``"""
    assert message.startswith(f"{what} is not supported with "), message
    assert f". Set {remedy}" in message and message.endswith(".") and "\n" not in message, message


@pytest.mark.parametrize(("overrides", "what", "remedy"), REFUSED, ids=[" ".join(row[0]) for row in REFUSED])
def test_refused(compose, overrides, what, remedy):
    with pytest.raises(ConfigCompositionException) as refused:
        compose("precision=jet_fp8", *overrides)
    check_shape(str(refused.value), what, remedy)


@pytest.mark.parametrize("precision", ["fp8_rollout", "fp8_rollout_tis"])
def test_the_sentence_names_the_chosen_precision(compose, precision):
    with pytest.raises(
        ConfigCompositionException,
        match=f"name=sglang is not supported with precision={precision}: the rollout runs in vLLM",
    ):
        compose(f"precision={precision}", f"{ROLLOUT}.name=sglang")


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ACTOR}.strategy=fsdp2", f"{REF}.strategy=fsdp2", "critic.strategy=fsdp2"],
        ["critic.strategy=megatron"],
        [f"{ACTOR}.fsdp_config.model_dtype=bf16"],
        [f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype:bf16,reduce_dtype:fp32}}"],
        [f"+{VLLM}.kv_cache_dtype=auto", f"+{VLLM}.enforce_eager=true", f"+{VLLM}.tensor_parallel_size=2"],
        [f"+{VLLM}.hf_overrides='{{\"rope_theta\": 1e6}}'"],
        ["trainer.v1.trainer_mode=colocate_async"],
        ["jetrl.backward=bf16", "jetrl.unfit_layers=skip", "jetrl.ref=fp8", "jetrl.critic=fp8"],
    ],
    ids=" ".join,
)
def test_accepted(compose, overrides):
    assert "jetrl" in compose("precision=jet_fp8", *overrides)


@pytest.mark.parametrize(
    ("precision", "rollout", "other"),
    [
        ("int8_rollout", "fp8", "fp8_rollout"),
        ("int8_rollout_tis", "fp8", "fp8_rollout_tis"),
        ("qurl_int8", "fp8", "qurl_fp8"),
        ("fp8_rollout", "int8", "int8_rollout"),
        ("fp8_rollout_tis", "int8", "int8_rollout_tis"),
        ("qurl_fp8", "int8", "qurl_int8"),
    ],
)
def test_a_rollout_in_another_format_has_another_name(compose, precision, rollout, other):
    sentence = (
        f"jetrl.rollout={rollout} is not supported with precision={precision}: that is another precision. "
        f"Set precision={other}."
    )
    with pytest.raises(ConfigCompositionException) as refused:
        compose(f"precision={precision}", f"jetrl.rollout={rollout}")
    assert str(refused.value) == sentence
    assert compose(f"precision={other}").jetrl.rollout == rollout


def test_training_in_another_format_has_the_name_of_its_rollout(compose):
    with pytest.raises(
        ConfigCompositionException, match="jetrl.train=bf16 is not supported.* Set precision=int8_rollout."
    ):
        compose("precision=jet_fp8", "jetrl.train=bf16", "jetrl.rollout=int8")


@pytest.mark.parametrize(
    ("overrides", "what", "remedy"),
    [
        (["jetrl.operations=stock"], "jetrl.operations=stock", "precision=bf16."),
        (["jetrl.operations=auto"], "jetrl.operations=auto", "precision=bf16."),
        (["jetrl.rollout=fp8"], "jetrl.rollout=fp8", "precision=fp8_rollout."),
        (["jetrl.rollout=int8"], "jetrl.rollout=int8", "precision=int8_rollout."),
        (["jetrl.train=fp8"], "jetrl.rollout=bf16", "jetrl.rollout=fp8."),
        (["jetrl.scale_rule=pow2"], "jetrl.scale_rule=pow2", "jetrl.scale_rule=fp32."),
        (["jetrl.unfit_layers=skip"], "jetrl.unfit_layers=skip", "jetrl.unfit_layers=stop."),
        (["jetrl.invariant_scaling=1.5"], "jetrl.invariant_scaling=1.5", "jetrl.invariant_scaling=1."),
        (["jetrl.backward=bf16"], "jetrl.backward=bf16", "jetrl.backward=fp8, or precision=jet_fp8."),
        (["clip=calibrated"], "jetrl.train=bf16", "precision=jet_fp8, or jetrl.clip=fixed."),
        ([f"{ROLLOUT}.top_p=0.9"], f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_p=1, or precision=jet_fp8"),
        ([f"+{VLLM}.quantization=jetrl_fp8"], f"{VLLM}.quantization", f"{VLLM}.quantization=null, or precision=bf16."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bf16_shared_is_bf16_linears_and_shared_operations(compose, overrides, what, remedy):
    with pytest.raises(ConfigCompositionException) as refused:
        compose("precision=bf16_shared", *overrides)
    check_shape(str(refused.value), what, remedy)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ROLLOUT}.tensor_model_parallel_size=4"],
        ["jetrl.ref=fp8", "jetrl.scale_rule=pow2", "jetrl.unfit_layers=skip"],
        ["correction=adaptive"],
    ],
    ids=" ".join,
)
def test_accepted_beside_bf16_linears(compose, overrides):
    options = compose("precision=bf16_shared", *overrides).jetrl
    assert (options.train, options.rollout, options.operations) == ("bf16", "bf16", "shared")


def test_backward_speaks_about_something_that_trains_in_fp8(compose):
    with pytest.raises(
        ConfigCompositionException, match="jetrl.backward=bf16 is not supported.*no model trains in FP8"
    ):
        compose("precision=fp8_rollout", "jetrl.backward=bf16")
    assert "jetrl" in compose("precision=fp8_rollout", "jetrl.backward=bf16", "jetrl.critic=fp8")


ONE_GPU = f"{ROLLOUT}.tensor_model_parallel_size=1"

REFUSED_EXACT = [
    ([f"{ROLLOUT}.top_p=0.95"], f"{ROLLOUT}.top_p=0.95", f"{ROLLOUT}.top_p=1, or precision=jet_fp8"),
    ([f"{ROLLOUT}.temperature=0"], f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature=1, or precision=jet_fp8"),
    (
        [f"{ROLLOUT}.calculate_log_probs=false"],
        f"{ROLLOUT}.calculate_log_probs=false",
        f"{ROLLOUT}.calculate_log_probs=true.",
    ),
    (
        ["trainer.v1.trainer_mode=colocate_async"],
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.trainer_mode=sync.",
    ),
    ([f"{MODEL}.use_liger=true"], f"{MODEL}.use_liger=true", f"{MODEL}.use_liger=false, or precision=jet_fp8"),
    (
        [f"+{VLLM}.attention_config.flash_attn_version=2"],
        f"{VLLM}.attention_config={{'flash_attn_version': 2}}",
        f"{VLLM}.attention_config=null",
    ),
    ([f"+{VLLM}.kv_cache_dtype=fp8"], f"{VLLM}.kv_cache_dtype=fp8", f"{VLLM}.kv_cache_dtype=auto."),
    (["jetrl.unfit_layers=skip"], "jetrl.unfit_layers=skip", "jetrl.unfit_layers=stop."),
    (["jetrl.operations=stock"], "jetrl.operations=stock", "jetrl.operations=shared, or precision=jet_fp8."),
    (["jetrl.operations=auto"], "jetrl.operations=auto", "jetrl.operations=shared, or precision=jet_fp8."),
    (["jetrl.operations=liger"], "jetrl.operations=liger", "jetrl.operations to one of auto, stock, shared."),
]
"""What the shared operations do not cover, one of a kind; all of it: test_support_on_cpu.py."""


@pytest.mark.parametrize(("overrides", "what", "remedy"), REFUSED_EXACT, ids=[" ".join(o[0]) for o in REFUSED_EXACT])
def test_refused_where_log_probabilities_are_to_be_equal(compose, overrides, what, remedy):
    with pytest.raises(ConfigCompositionException) as refused:
        compose("precision=jet_fp8_exact", ONE_GPU, *overrides)
    check_shape(str(refused.value), what, remedy)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ROLLOUT}.temperature=0.6", "jetrl.scale_rule=pow2", "jetrl.backward=bf16"],
        [f"{ROLLOUT}.val_kwargs.top_p=0.7", f"{ROLLOUT}.val_kwargs.temperature=0"],
        [f"+{VLLM}.attention_backend=FLASH_ATTN", f"+{VLLM}.max_num_seqs=64"],
        [f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.enforce_eager=false"],
        [f"{MODEL}.use_remove_padding=true", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.strategy=fsdp2"],
    ],
    ids=" ".join,
)
def test_accepted_where_log_probabilities_are_to_be_equal(compose, overrides):
    assert compose("precision=jet_fp8_exact", ONE_GPU, *overrides).jetrl.operations == "shared"


def test_options_without_a_precision_are_refused(compose):
    with pytest.raises(ConfigCompositionException, match="Set precision=<fp8_rollout|fp8_rollout_tis|jet_fp8>"):
        compose("+jetrl.scale_rule=pow2")


def test_check_config_serves_programs_too(compose):
    config = compose("precision=jet_fp8")
    check_config(config)
    OmegaConf.update(config, f"{ROLLOUT}.name", "sglang")
    with pytest.raises(UnsupportedConfiguration, match=f"Set {ROLLOUT}.name=vllm, or precision=bf16"):
        check_config(config)
    check_config(OmegaConf.create({"trainer": {"use_v1": False}}))


def test_jet_config_is_frozen_and_round_trips(compose):
    options = JetConfig.from_node(compose("precision=jet_fp8").jetrl)
    assert JetConfig.from_node(options.as_dict()) == options == JetConfig.from_node(options)
    with pytest.raises(AttributeError):
        options.train = "bf16"
