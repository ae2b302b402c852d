# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Configurations that a precision cannot serve: each is refused at composition, with the sentence a user will read."""

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from jetrl_verl.config import JetConfig, UnsupportedConfiguration, check_config

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VLLM = f"+{ROLLOUT}.engine_kwargs.vllm"

# overrides -> what the sentence must hold: the key as the user would type it, and what to use instead
REFUSED = [
    (["model_engine=megatron"], f"{ACTOR}.strategy=megatron; use fsdp or fsdp2"),
    (["model_engine=veomni"], f"{ACTOR}.strategy=veomni; use fsdp or fsdp2"),
    (["model_engine=torchtitan"], f"{ACTOR}.strategy=torchtitan; use fsdp or fsdp2"),
    ([f"{ACTOR}.strategy=fsdp_turbo"], f"{ACTOR}.strategy=fsdp_turbo; use fsdp or fsdp2"),
    ([f"{ACTOR}.strategy=automodel"], f"{ACTOR}.strategy=automodel; use fsdp or fsdp2"),
    ([f"{REF}.strategy=megatron"], f"{REF}.strategy=megatron; use fsdp or fsdp2"),
    (["jetrl.critic=fp8", "critic.strategy=megatron"], "critic.strategy=megatron; use fsdp or fsdp2"),
    ([f"{ROLLOUT}.name=sglang"], f"{ROLLOUT}.name=sglang; use vllm or precision=bf16"),
    ([f"{ROLLOUT}.name=trtllm"], f"{ROLLOUT}.name=trtllm; use vllm or precision=bf16"),
    ([f"{ROLLOUT}.name=hf"], f"{ROLLOUT}.name=hf; use vllm or precision=bf16"),
    ([f"{MODEL}.lora_rank=32"], f"not LoRA adapters; set {MODEL}.lora_rank=0"),
    ([f"{MODEL}.lora.rank=32"], f"not LoRA adapters; set {MODEL}.lora.rank=0"),
    ([f"{MODEL}.lora_adapter_path=/adapter"], f"remove {MODEL}.lora_adapter_path"),
    ([f"{MODEL}.lora.adapter_path=/adapter"], f"remove {MODEL}.lora.adapter_path"),
    ([f"{MODEL}.mtp.enable=true"], f"set {MODEL}.mtp.enable=false"),
    ([f"{ACTOR}.qat.enable=true"], f"({ACTOR}.qat.enable); set it to false"),
    ([f"{ACTOR}.fsdp_config.qat.enable=true"], "quantisation-aware training"),
    ([f"{ROLLOUT}.qat={{enable:true}}"], f"({ROLLOUT}.qat.enable); set it to false"),
    ([f"{ACTOR}.fsdp_config.dtype=float16"], f"{ACTOR}.fsdp_config.dtype=float16; use bfloat16"),
    (
        [f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16"],
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16; use bfloat16",
    ),
    ([f"{ACTOR}.fsdp_config.model_dtype=fp16"], f"{ACTOR}.fsdp_config.model_dtype=fp16; use fp32"),
    ([f"{ROLLOUT}.quantization=fp8"], f"{ROLLOUT}.quantization=fp8 contradicts it; remove it"),
    ([f"{ROLLOUT}.quantization_config_file=q.json"], f"{ROLLOUT}.quantization_config_file=q.json contradicts it"),
    ([f"{VLLM}.quantization=fp8"], "engine_kwargs.vllm.quantization is set against"),
    ([f"{VLLM}.hf_overrides.quantization_config.quant_method=fp8"], "hf_overrides.quantization_config is set against"),
    ([f"{VLLM}.worker_extension_cls=my.Extension"], "engine_kwargs.vllm.worker_extension_cls is set against"),
    ([f"{VLLM}.hf_overrides=nonsense"], "hf_overrides is not a mapping"),
    ([f"{VLLM}.dtype=float16"], f"{ROLLOUT}.engine_kwargs.vllm.dtype=float16; use bfloat16"),
    ([f"{VLLM}.load_format=safetensors"], f"{ROLLOUT}.engine_kwargs.vllm.load_format=safetensors; use dummy"),
    ([f"{VLLM}.pipeline_parallel_size=2"], f"{ROLLOUT}.engine_kwargs.vllm.pipeline_parallel_size=2; use 1"),
    ([f"{VLLM}.enable_expert_parallel=true"], f"{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel=True; use false"),
    ([f"{VLLM}.kv_cache_dtype=fp8"], f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8; use auto"),
    ([f"{VLLM}.tensor_parallel_size=4"], f"{ROLLOUT}.tensor_model_parallel_size; set 4 there"),
    ([f"{ROLLOUT}.dtype=float16"], f"{ROLLOUT}.dtype=float16; use bfloat16"),
    ([f"{ROLLOUT}.load_format=auto"], f"{ROLLOUT}.load_format=auto is unsupported; use dummy"),
    ([f"{ROLLOUT}.pipeline_model_parallel_size=2"], f"pipeline parallel; set {ROLLOUT}.pipeline_model_parallel_size=1"),
    ([f"{ROLLOUT}.expert_parallel_size=2"], f"expert parallel; set {ROLLOUT}.expert_parallel_size=1"),
    ([f"{ROLLOUT}.enable_rollout_routing_replay=true"], "no router"),
    ([f"{ROLLOUT}.disaggregation.enabled=true"], f"set {ROLLOUT}.disaggregation.enabled=false"),
    ([f"{ROLLOUT}.checkpoint_engine.backend=nccl"], f"{ROLLOUT}.checkpoint_engine.backend=nccl; use naive"),
    ([f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded"], "checkpoint_engine.backend=delta_sharded; use naive"),
    ([f"+{ROLLOUT}.checkpoint_manager_class=my.Manager"], f"remove {ROLLOUT}.checkpoint_manager_class"),
    ([f"{ROLLOUT}.nnodes=1"], "trainer and rollout on the same GPUs"),
    (["actor_rollout_ref.hybrid_engine=false"], "set actor_rollout_ref.hybrid_engine=true"),
    (["trainer.v1.trainer_mode=separate_async"], "trainer.v1.trainer_mode=separate_async; use sync"),
    (["trainer.use_v1=false"], "remove trainer.use_v1=false"),
    (["trainer.use_v1=0"], "remove trainer.use_v1=false"),
    (["trainer.device=npu"], "trainer.device=npu; use cuda"),
    ([f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig"], f"remove {ACTOR}.fsdp_config._target_"),
    ([f"{ROLLOUT}._target_=verl.workers.config.RolloutConfig"], f"remove {ROLLOUT}._target_"),
    (["critic.fsdp._target_=verl.workers.config.FSDPEngineConfig"], "remove critic.fsdp._target_"),
    ([f"{ROLLOUT}.custom=null"], f"keep that key when overriding {ROLLOUT}.custom"),
    ([f"{ACTOR}.fsdp_config.jetrl=null"], "keep that key when overriding"),
    (["jetrl.scale_rule=ue8m0"], "jetrl.scale_rule=ue8m0 is not a choice; use one of fp32, pow2."),
    (["jetrl.contract_check=1"], "jetrl.contract_check=1 is not a choice; use one of true, false."),
    (["jetrl.unfit_layers=ignore"], "jetrl.unfit_layers=ignore is not a choice; use one of stop, skip."),
    (["jetrl.train=bf16"], "is what precision=fp8_rollout names; use that."),
    (["jetrl.precision=fp8_rollout"], "is what precision=jet_fp8 names; use that."),
    (
        [f"{ROLLOUT}.calculate_log_probs=false", "algorithm.rollout_correction.rollout_is=token"],
        f"rollout_is=token); set {ROLLOUT}.calculate_log_probs=true",
    ),
    (
        [f"{ROLLOUT}.calculate_log_probs=false", "algorithm.rollout_correction.rollout_rs=token_k1"],
        f"rollout_rs=token_k1); set {ROLLOUT}.calculate_log_probs=true",
    ),
    ([f"{VLLM}.enable_lora=true"], f"{ROLLOUT}.engine_kwargs.vllm.enable_lora=True; use false"),
    ([f"{VLLM}.speculative_config={{method:ngram}}"], "speculative_config={'method': 'ngram'}; use no speculative"),
    ([f"+{REF}.qat.enable=true"], f"({REF}.qat.enable); set it to false"),
    ([f"{REF}.fsdp_config.dtype=float16"], f"{REF}.fsdp_config.dtype=float16; use bfloat16"),
    ([f"{REF}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig"], f"remove {REF}.fsdp_config._target_"),
    ([f"{REF}.fsdp_config.jetrl=null"], f"keep that key when overriding {REF}.fsdp_config"),
    (["critic.fsdp.jetrl=null"], "keep that key when overriding critic.fsdp"),
    (["jetrl.rollout=bf16"], "would sample from another policy than it trains; use jetrl.rollout=fp8."),
    (["jetrl.train=bf16", "jetrl.rollout=bf16"], "leaves nothing in FP8; use precision=bf16."),
    (["+jetrl.scales=fp32"], "jetrl.scales is not an option; use one of precision, train, rollout, scale_rule"),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_refused(compose, overrides, sentence):
    with pytest.raises(ConfigCompositionException) as refused:
        compose("precision=jet_fp8", *overrides)
    message = str(refused.value)
    assert sentence in message
    assert message.endswith(".") and "\n" not in message


@pytest.mark.parametrize("precision", ["fp8_rollout", "fp8_rollout_tis"])
def test_the_sentence_names_the_chosen_precision(compose, precision):
    with pytest.raises(ConfigCompositionException, match=f"^precision={precision} rolls out with vLLM"):
        compose(f"precision={precision}", f"{ROLLOUT}.name=sglang")


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ACTOR}.strategy=fsdp2", f"{REF}.strategy=fsdp2", "critic.strategy=fsdp2"],
        ["critic.strategy=megatron"],
        [f"{ACTOR}.fsdp_config.model_dtype=bf16"],
        [f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype:bf16,reduce_dtype:fp32}}"],
        [f"{VLLM}.kv_cache_dtype=auto", f"{VLLM}.enforce_eager=true", f"{VLLM}.tensor_parallel_size=2"],
        [f"{VLLM}.hf_overrides='{{\"rope_theta\": 1e6}}'"],
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
    sentence = f"precision={precision} with jetrl.rollout={rollout} is what precision={other} names; use that."
    with pytest.raises(ConfigCompositionException) as refused:
        compose(f"precision={precision}", f"jetrl.rollout={rollout}")
    assert str(refused.value) == sentence
    assert compose(f"precision={other}").jetrl.rollout == rollout


def test_training_in_another_format_has_the_name_of_its_rollout(compose):
    with pytest.raises(ConfigCompositionException, match="jetrl.train=bf16 is what precision=int8_rollout names"):
        compose("precision=jet_fp8", "jetrl.train=bf16", "jetrl.rollout=int8")


def test_backward_speaks_about_something_that_trains_in_fp8(compose):
    with pytest.raises(ConfigCompositionException, match="jetrl.backward=bf16 speaks about models that train in FP8"):
        compose("precision=fp8_rollout", "jetrl.backward=bf16")
    assert "jetrl" in compose("precision=fp8_rollout", "jetrl.backward=bf16", "jetrl.critic=fp8")


ONE_GPU = f"{ROLLOUT}.tensor_model_parallel_size=1"

REFUSED_EXACT = [
    ([f"{ROLLOUT}.tensor_model_parallel_size=2"], f"set {ROLLOUT}.tensor_model_parallel_size=1"),
    ([f"{ROLLOUT}.top_p=0.95"], f"which do not cover {ROLLOUT}.top_p=0.95; use 1."),
    ([f"{ROLLOUT}.temperature=0"], f"which do not cover {ROLLOUT}.temperature=0; use a positive one."),
    ([f"{ROLLOUT}.calculate_log_probs=false"], f"set {ROLLOUT}.calculate_log_probs=true"),
    (["trainer.v1.trainer_mode=colocate_async"], "trainer.v1.trainer_mode=colocate_async; use sync"),
    ([f"{MODEL}.use_liger=true"], f"which do not cover {MODEL}.use_liger=true; use false."),
    ([f"{ACTOR}.ulysses_sequence_parallel_size=2"], f"{ACTOR}.ulysses_sequence_parallel_size=2; use 1."),
    ([f"{VLLM}.attention_config.flash_attn_version=2"], "use the default."),
    ([f"{VLLM}.kv_cache_dtype=fp8"], "kv_cache_dtype=fp8; use auto"),
    (["jetrl.unfit_layers=skip"], "use jetrl.unfit_layers=stop."),
    (["jetrl.operations=stock"], "is what precision=jet_fp8 names; use that."),
    (["jetrl.operations=auto"], "is what precision=jet_fp8 names; use that."),
    (["jetrl.operations=liger"], "jetrl.operations=liger is not a choice; use one of auto, stock, shared."),
]
"""What the shared operations do not cover, one of a kind; all of it: test_operations_on_cpu.py."""


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED_EXACT, ids=[" ".join(o) for o, _ in REFUSED_EXACT])
def test_refused_where_log_probabilities_are_to_be_equal(compose, overrides, sentence):
    with pytest.raises(ConfigCompositionException) as refused:
        compose("precision=jet_fp8_exact", ONE_GPU, *overrides)
    message = str(refused.value)
    assert sentence in message
    assert message.endswith(".") and "\n" not in message


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ROLLOUT}.temperature=0.6", "jetrl.scale_rule=pow2", "jetrl.backward=bf16"],
        [f"{ROLLOUT}.val_kwargs.top_p=0.7", f"{ROLLOUT}.val_kwargs.temperature=0"],
        [f"{VLLM}.attention_backend=FLASH_ATTN", f"{VLLM}.max_num_seqs=64"],
        [f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.enforce_eager=false"],
        [f"{MODEL}.use_remove_padding=true", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.strategy=fsdp2"],
    ],
    ids=" ".join,
)
def test_accepted_where_log_probabilities_are_to_be_equal(compose, overrides):
    assert compose("precision=jet_fp8_exact", ONE_GPU, *overrides).jetrl.operations == "shared"


def test_options_without_a_precision_are_refused(compose):
    with pytest.raises(ConfigCompositionException, match="add precision=<fp8_rollout|fp8_rollout_tis|jet_fp8>"):
        compose("+jetrl.scale_rule=pow2")


def test_check_config_serves_programs_too(compose):
    config = compose("precision=jet_fp8")
    check_config(config)
    OmegaConf.update(config, f"{ROLLOUT}.name", "sglang")
    with pytest.raises(UnsupportedConfiguration, match="use vllm or precision=bf16"):
        check_config(config)
    check_config(OmegaConf.create({"trainer": {"use_v1": False}}))


def test_jet_config_is_frozen_and_round_trips(compose):
    options = JetConfig.from_node(compose("precision=jet_fp8").jetrl)
    assert JetConfig.from_node(options.as_dict()) == options == JetConfig.from_node(options)
    with pytest.raises(AttributeError):
        options.train = "bf16"
