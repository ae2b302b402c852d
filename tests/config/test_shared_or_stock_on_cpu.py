# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What ``jetrl.operations=auto`` becomes and why, in a driver without a GPU."""

import copy
import json

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from jetrl_verl.config import UnsupportedConfiguration, composition, resolve

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"

QWEN3 = {"model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 128}


@pytest.fixture(scope="module")
def composed():
    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides=["precision=jet_fp8"])


@pytest.fixture
def model(tmp_path):
    """Callable that writes a model's configuration with some keys changed; the folder."""

    def write(**changes) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **changes}))
        return str(tmp_path)

    return write


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """A driver that has printed nothing yet."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    composition._say.cache_clear()


@pytest.fixture
def run(composed, capsys):
    """Callable (settings) -> (operations after resolution, stderr)."""

    def _run(settings: dict, operations: str = "auto") -> tuple[str, str]:
        config = copy.deepcopy(composed)
        for key, value in {"jetrl.operations": operations, **settings}.items():
            OmegaConf.update(config, key, value, force_add=True)
        job = resolve(config)
        assert job.shared == (config.jetrl.operations == "shared") == (not job.why_stock)
        for node in (f"{ACTOR}.fsdp_config", f"{ROLLOUT}.custom"):
            assert OmegaConf.select(config, f"{node}.jetrl.operations") == config.jetrl.operations
        return config.jetrl.operations, capsys.readouterr().err

    return _run


def test_auto_is_shared_where_every_operation_is_supported(run, model):
    settings = {f"{MODEL}.path": model()}
    assert run(settings) == (
        "shared",
        "jetrl_verl: jetrl.operations=auto is shared, since the shared operations cover the whole job.\n",
    )
    assert run(settings) == ("shared", "")  # Hydra composes twice before a run; the line is printed once


@pytest.mark.parametrize(
    "settings",
    [
        {f"{ROLLOUT}.tensor_model_parallel_size": 2},
        {f"{ROLLOUT}.calculate_log_probs": False},
        {"trainer.v1.trainer_mode": "colocate_async"},
        {"jetrl.unfit_layers": "skip"},
        {f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ROLLOUT}.val_kwargs.temperature": 0},
        {
            f"{MODEL}.use_remove_padding": False,
            f"{ROLLOUT}.temperature": 0.6,
            f"{VLLM}.attention_backend": "FLASH_ATTN",
        },
    ],
    ids=str,
)
def test_auto_is_shared_where_only_the_last_bits_may_differ(run, model, settings):
    settings |= {f"{MODEL}.path": model()}
    assert run(settings)[0] == run(settings, "shared")[0] == "shared"


def test_the_cpu_platform_makes_auto_stock(run, model, monkeypatch):
    settings = {f"{MODEL}.path": model()}
    assert run(settings | {"jetrl.kv_cache": "fp8"})[0] == "shared"
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert "since the shared operations are slow on a CPU" in run(settings)[1]
    with pytest.raises(UnsupportedConfiguration, match="jetrl.kv_cache=fp8 is not supported with .*operations=stock"):
        run(settings | {"jetrl.kv_cache": "fp8"})
    assert run(settings, "shared") == ("shared", "")  # slow, not impossible


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (f"{MODEL}.override_config", {"attn_implementation": "sdpa", "rope_theta": 1e6}, "rope_theta"),
        (f"{MODEL}.override_config", {"model_config": {"attention_dropout": 0.1}}, "attention_dropout"),
        (f"{VLLM}.hf_overrides", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        (f"{VLLM}.hf_overrides", '{"rope_parameters": {"rope_type": "yarn"}}', "rope_parameters"),
    ],
    ids=str,
)
def test_auto_is_stock_where_the_job_overrides_the_model_config(run, model, key, value, named):
    operations, stderr = run({f"{MODEL}.path": model(num_hidden_layers=2), key: value})
    assert (
        operations == "stock"
        and f"since {key} overrides {named} of the model. Set jetrl.operations=shared if" in stderr
    )


@pytest.mark.parametrize("node", [f"{MODEL}.override_config", f"{MODEL}.override_config.model_config"])
def test_auto_is_shared_where_the_trainer_turns_dropout_off(run, model, node):
    path = model(model_type="seed_oss", num_hidden_layers=2)
    published = {f"{MODEL}.path": path}
    assert run(published)[1].endswith(": the shared operations do not cover attention dropout.\n")
    half = published | {f"{node}.attention_dropout": 0}
    assert run(half)[1].endswith(": the shared operations do not cover residual dropout.\n")
    assert run(half | {f"{node}.residual_dropout": 0.0})[0] == "shared"


def test_overrides_that_no_operation_reads_keep_auto_shared(run, model):
    settings = {f"{MODEL}.path": model(num_hidden_layers=2)}
    settings |= {f"{MODEL}.override_config": {"attn_implementation": "sdpa", "attention_dropout": 0.0}}
    settings |= {f"{VLLM}.hf_overrides": {"max_position_embeddings": 4096}}
    assert run(settings)[0] == "shared"


def test_auto_is_stock_for_a_missing_model(run):
    assert "since the model folder /no/model does not exist." in run({f"{MODEL}.path": "/no/model"})[1]


def test_auto_is_shared_for_a_remote_model_unless_the_job_overrides_it(run):
    """The driver reads it right before the job starts, when nothing can become stock any more."""
    remote = {f"{MODEL}.path": "hdfs://cluster/model"}
    assert run(remote)[0] == "shared"
    operations, stderr = run(remote | {f"{MODEL}.override_config": {"rope_theta": 1e6}})
    assert operations == "stock" and "overrides rope_theta of the model" in stderr


def test_trainer_and_vllm_get_the_drivers_choice(model):
    """Through Hydra, as a run gets it."""
    runnable = [f"{ROLLOUT}.name=vllm", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{MODEL}.path={model()}"]
    runnable += [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra_compose("ppo_trainer", overrides=["precision=jet_fp8", *runnable])
    OmegaConf.resolve(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine.shared_operations
    vllm = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs["vllm"]
    assert vllm["hf_overrides"]["quantization_config"]["operations"] == "shared"
