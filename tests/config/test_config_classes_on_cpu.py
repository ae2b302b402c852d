# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The config classes that a precision selects, built as verl builds them: from the composed config, in any process."""

import copy
import importlib
import pickle
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPEngineConfig, RolloutConfig

from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.targets.configs import JetRolloutConfig, JetWorkerEngineConfig

RUNNABLE = [
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
]


@pytest.fixture
def config(compose):
    return compose("precision=jet_fp8", *RUNNABLE)


def test_actor_engine_config(config):
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    engine = actor.engine
    assert type(engine) is JetWorkerEngineConfig and isinstance(engine, FSDPEngineConfig)
    assert engine.jetrl == Job.of(config.jetrl) == omega_conf_to_dataclass(config.actor_rollout_ref.rollout).jetrl
    assert engine.jetrl.options == JetConfig(precision="jet_fp8", train="fp8", rollout="fp8")
    assert engine.jetrl_role == "actor" and engine.quantized_linears
    assert engine.jetrl.rollout_ranks == config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_the_engine_gets_verls_strategy(compose, strategy):
    config = compose("precision=jet_fp8", f"actor_rollout_ref.actor.strategy={strategy}", *RUNNABLE)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine.strategy == strategy


@pytest.mark.parametrize(("option", "fp8"), [("bf16", False), ("fp8", True)])
def test_ref_and_critic_follow_their_own_option(compose, option, fp8):
    config = compose("precision=fp8_rollout", f"jetrl.ref={option}", f"jetrl.critic={option}", *RUNNABLE)
    assert not omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine.quantized_linears
    ref = omega_conf_to_dataclass(config.actor_rollout_ref.ref.fsdp_config)
    critic = omega_conf_to_dataclass(config.critic.fsdp)
    assert ref.jetrl_role == "ref" and ref.forward_only and ref.quantized_linears is fp8
    assert critic.jetrl_role == "critic" and critic.quantized_linears is fp8


def test_ref_config_as_the_worker_builds_it(config):
    """``engine_workers.init_model`` renames some keys of the ref node first and then takes the whole node."""
    ref = config.actor_rollout_ref.ref
    OmegaConf.set_struct(ref, False)
    for key in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"):
        value = ref.pop(f"log_prob_{key}")
        ref[key if key == "use_dynamic_bsz" else f"ppo_{key}"] = value
    ref.ppo_micro_batch_size_per_gpu = 1
    assert omega_conf_to_dataclass(ref).engine.jetrl_role == "ref"


def test_the_rollout_config_selects_the_plugins_linears_in_vllm(compose):
    config = compose("precision=jet_fp8", "jetrl.scale_rule=pow2", "jetrl.unfit_layers=skip", *RUNNABLE)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert type(rollout) is JetRolloutConfig and isinstance(rollout, RolloutConfig)
    assert rollout.quantization is None  # verl's own option stays free
    vllm = rollout.engine_kwargs["vllm"]
    assert vllm["quantization"] == "jetrl_fp8"
    assert vllm["worker_extension_cls"] == "jetrl_verl.rollout.worker.JetWorkerExtension"
    quantization = vllm["hf_overrides"]["quantization_config"]
    assert quantization["quant_method"] == "jetrl_fp8"
    assert quantization["scale_rule"] == "pow2"
    assert quantization["unfit_layers"] == "skip"


@pytest.mark.parametrize(
    ("operations", "worker"), [("shared", "jetrl_verl.rollout.worker.JetWorker"), ("stock", "auto")]
)
def test_only_shared_operations_need_the_plugins_worker(compose, operations, worker):
    key = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls"
    config = compose("precision=jet_fp8", f"jetrl.operations={operations}", f"{key}=auto", *RUNNABLE)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs["vllm"]["worker_cls"] == worker


def test_without_chunked_prefill_verl_raises_the_batched_tokens_to_the_longest_request(compose):
    """With verl's own class this raises ``FrozenInstanceError`` in the rollout's server."""
    from transformers import Qwen3Config
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    key = "actor_rollout_ref.rollout"
    words = (f"{key}.enable_chunked_prefill=False", f"{key}.max_num_batched_tokens=64", f"{key}.max_num_seqs=256")
    config = compose("precision=jet_fp8", *words, *RUNNABLE)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    # vLLM itself refuses fewer tokens than requests.
    assert (rollout.max_model_len, rollout.max_num_batched_tokens) == (None, 256)
    model = SimpleNamespace(hf_config=Qwen3Config(max_position_embeddings=40960))
    vLLMHttpServer._validate_configs(SimpleNamespace(config=rollout, model_config=model))
    assert (rollout.max_model_len, rollout.max_num_batched_tokens) == (40960, 40960)


def test_the_worker_extension_is_a_subclass_of_verls(config):
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    path = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs["vllm"]["worker_extension_cls"]
    module, name = path.rsplit(".", 1)
    assert issubclass(getattr(__import__(module, fromlist=[name]), name), vLLMColocateWorkerExtension)


def test_configs_survive_pickling(config):
    """Ray pickles built configs; a rebuilt or copied one is the same."""
    for built in (
        omega_conf_to_dataclass(config.actor_rollout_ref.actor),
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout),
        omega_conf_to_dataclass(config.critic.fsdp),
    ):
        assert pickle.loads(pickle.dumps(built)) == built == copy.deepcopy(built)
        assert omega_conf_to_dataclass(built) is built


def test_a_resolved_config_without_its_root_is_enough(config):
    """The task runner resolves the config and hands workers ``actor_rollout_ref`` alone."""
    OmegaConf.resolve(config)
    alone = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref))
    assert omega_conf_to_dataclass(alone.actor).engine.quantized_linears
    assert omega_conf_to_dataclass(alone.rollout).jetrl.options.train == "fp8"


@pytest.mark.parametrize(("environment", "registered"), [({"RANK": "0"}, True), ({}, False)])
def test_the_engine_is_registered_where_models_are_built(config, monkeypatch, environment, registered):
    """Workers carry RANK. The critic's config reaches them by pickle, so its ``__post_init__`` never runs there."""
    imported, import_module = [], importlib.import_module

    def record(name, package=None):
        imported.append(name)
        return import_module(name, package) if name != "jetrl_verl.train.engine" else None

    monkeypatch.setattr(importlib, "import_module", record)
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    critic = omega_conf_to_dataclass(config.critic.fsdp)
    assert ("jetrl_verl.train.engine" in imported) is registered
    imported.clear()
    pickle.loads(pickle.dumps(critic))
    assert ("jetrl_verl.train.engine" in imported) is registered


def test_config_classes_need_options():
    with pytest.raises(ValueError, match="was not resolved; call"):
        JetFSDPEngineConfig()
    with pytest.raises(ValueError, match="was not resolved; call"):
        JetRolloutConfig(name="vllm")
    node = Job(JetConfig("jet_fp8", train="fp8", rollout="fp8")).as_dict()
    without_facts = {key: value for key, value in node.items() if key != "job"}
    for unresolved in (node | {"operations": "auto"}, node | {"backward": "auto"}, without_facts):
        with pytest.raises(ValueError, match="was not resolved; call"):
            JetFSDPEngineConfig(jetrl=unresolved)


def test_the_users_engine_kwargs_are_not_changed_in_place():
    user = {"vllm": {"hf_overrides": {"rope_theta": 1e6}}}
    node = Job(JetConfig("jet_fp8", train="fp8", rollout="fp8")).as_dict()
    rollout = JetRolloutConfig(name="vllm", custom={"jetrl": node}, engine_kwargs=user)
    assert user == {"vllm": {"hf_overrides": {"rope_theta": 1e6}}}
    assert rollout.engine_kwargs["vllm"]["hf_overrides"]["rope_theta"] == 1e6
