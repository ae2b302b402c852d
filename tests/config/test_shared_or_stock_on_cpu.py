# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl.operations`` on a simulated machine: what ``auto`` becomes and why, and when ``shared`` is refused."""

import copy
import json

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from jetrl_verl.config import JetConfig, JetFSDPEngineConfig, UnsupportedConfiguration, check_config, environment
from jetrl_verl.config import operations as module
from jetrl_verl.config.operations import resolve_operations

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


@pytest.fixture
def hopper(monkeypatch, tmp_path_factory):
    """A machine that supports the shared operations; callable that changes its GPU."""
    vllm = tmp_path_factory.mktemp("vllm")
    (vllm / "vllm_flash_attn").mkdir()
    (vllm / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").touch()
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(environment, "find_spec", lambda name: type("Spec", (), {"origin": str(vllm / "__init__.py")}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A GPU")
    module._say.cache_clear()

    def play(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])

    play((9, 0), (9, 0))
    return play


@pytest.fixture
def run(composed, capsys):
    """Callable (settings) -> (operations after resolution, stderr)."""

    def _run(settings: dict, operations: str = "auto") -> tuple[str, str]:
        config = copy.deepcopy(composed)
        for key, value in {"jetrl.operations": operations, **settings}.items():
            OmegaConf.update(config, key, value, force_add=True)
        check_config(config)
        resolve_operations(config)
        for node in (f"{ACTOR}.fsdp_config", f"{ROLLOUT}.custom"):
            assert OmegaConf.select(config, f"{node}.jetrl.operations") == config.jetrl.operations
        return config.jetrl.operations, capsys.readouterr().err

    return _run


def test_auto_is_shared_where_every_operation_is_supported(hopper, run, model):
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
def test_auto_is_shared_where_only_the_last_bits_may_differ(hopper, run, model, settings):
    settings |= {f"{MODEL}.path": model()}
    assert run(settings)[0] == run(settings, "shared")[0] == "shared"


def test_another_gpu_and_a_cpu_make_auto_stock(hopper, run, model, monkeypatch):
    settings = {f"{MODEL}.path": model()}
    hopper((9, 0), (8, 9))
    words = "since GPU 1, A GPU, of compute capability 8.9, is not supported with jetrl.operations=shared: Flash"
    assert words in run(settings)[1]
    hopper((9, 0))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert "since the shared operations are slow on a CPU" in run(settings)[1]
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
def test_auto_is_stock_where_the_job_overrides_the_model_config(hopper, run, model, key, value, named):
    operations, stderr = run({f"{MODEL}.path": model(num_hidden_layers=2), key: value})
    assert (
        operations == "stock"
        and f"since {key} overrides {named} of the model. Set jetrl.operations=shared if" in stderr
    )


@pytest.mark.parametrize("node", [f"{MODEL}.override_config", f"{MODEL}.override_config.model_config"])
def test_auto_is_shared_where_the_trainer_turns_dropout_off(hopper, run, model, node):
    path = model(model_type="seed_oss", num_hidden_layers=2)
    published = {f"{MODEL}.path": path}
    assert run(published)[1].endswith(": the shared operations do not cover attention dropout.\n")
    half = published | {f"{node}.attention_dropout": 0}
    assert run(half)[1].endswith(": the shared operations do not cover residual dropout.\n")
    assert run(half | {f"{node}.residual_dropout": 0.0})[0] == "shared"


def test_overrides_that_no_operation_reads_keep_auto_shared(hopper, run, model):
    settings = {f"{MODEL}.path": model(num_hidden_layers=2)}
    settings |= {f"{MODEL}.override_config": {"attn_implementation": "sdpa", "attention_dropout": 0.0}}
    settings |= {f"{VLLM}.hf_overrides": {"max_position_embeddings": 4096}}
    assert run(settings)[0] == "shared"


def test_auto_is_stock_for_a_missing_model(hopper, run):
    assert "since the model folder /no/model does not exist." in run({f"{MODEL}.path": "/no/model"})[1]


def test_trainer_and_vllm_get_the_drivers_choice(hopper, model):
    """Through Hydra, as a run gets it."""
    runnable = [f"{ROLLOUT}.name=vllm", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{MODEL}.path={model()}"]
    runnable += [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra_compose("ppo_trainer", overrides=["precision=jet_fp8", *runnable])
    OmegaConf.resolve(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine.shared_operations
    vllm = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs["vllm"]
    assert vllm["hf_overrides"]["quantization_config"]["operations"] == "shared"


def test_only_the_driver_resolves_auto():
    with pytest.raises(UnsupportedConfiguration, match="Set jetrl.operations=shared or jetrl.operations=stock"):
        JetFSDPEngineConfig(jetrl=JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="auto"))
