# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What ``jetrl.operations=auto`` becomes and why, in a driver without a GPU."""

import copy

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf
from support_models import MIXTURE
from verl.utils.config import omega_conf_to_dataclass

from jetrl_verl.config import composition
from jetrl_verl.config.composition import resolve
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.config.support.table import TABLE

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"


@pytest.fixture(scope="module")
def composed():
    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides=["precision=jet_fp8"])


@pytest.fixture
def run(composed, model, capsys):
    """Callable (settings) -> (operations after resolution, stderr)."""

    def _run(settings: dict, operations: str = "auto") -> tuple[str, str]:
        config = copy.deepcopy(composed)
        one_update = {f"{ACTOR}.ppo_mini_batch_size": config.data.train_batch_size}
        for key, value in {"jetrl.operations": operations, **one_update, **settings}.items():
            OmegaConf.update(config, key, value, force_add=True)
        job = resolve(config)
        assert job.shared == (config.jetrl.operations == "shared") and job.bit_equal == (job.shared and not job.inexact)
        for node in (f"{ACTOR}.fsdp_config", f"{ROLLOUT}.custom"):
            assert OmegaConf.select(config, f"{node}.jetrl.operations") == config.jetrl.operations
        return config.jetrl.operations, capsys.readouterr().err

    return _run


@pytest.mark.parametrize(
    ("without_kernels", "settings", "changes", "backward"),
    [
        (True, {}, {}, "bf16"),
        (True, {"jetrl.backward": "fp8"}, {}, "fp8"),
        (True, {"jetrl.train": "bf16"}, {}, "fp8"),
        (True, {}, MIXTURE, "fp8"),
        (True, {}, {"model_type": "unknown"}, "fp8"),
        (False, {}, {}, "fp8"),
    ],
)
def test_the_backward_is_bf16_on_hopper_without_the_kernels(
    composed, model, monkeypatch, capsys, without_kernels, settings, changes, backward
):
    monkeypatch.setattr(composition, "_hopper_without_kernels", lambda: without_kernels)
    config = copy.deepcopy(composed)
    for key, value in {f"{MODEL}.path": model(changes), "jetrl.backward": "auto", **settings}.items():
        OmegaConf.update(config, key, value)
    assert resolve(config).options.backward == config.jetrl.backward == backward
    assert ("jetrl.backward=auto is bf16" in capsys.readouterr().err) == (backward == "bf16")


def test_auto_is_shared_where_every_operation_is_supported(run, model):
    settings = {f"{MODEL}.path": model()}
    assert run(settings) == (
        "shared",
        "jetrl_verl: exact: log-probabilities of rollout and trainer agree in every bit, so k3_kl is 0.\n",
    )
    assert run(settings) == ("shared", "")  # Hydra composes twice before a run; the line is printed once


ABOVE = "k3_kl will be above 0"


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, []),
        ({f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ROLLOUT}.val_kwargs.temperature": 0}, []),
        ({f"{MODEL}.use_remove_padding": False, f"{VLLM}.attention_backend": "FLASH_ATTN"}, []),
        (
            {f"{ROLLOUT}.calculate_log_probs": False},
            [
                f"OFF: {ROLLOUT}.calculate_log_probs=false (its log-probabilities are what is compared); nothing "
                f"compares the two sides. Set {ROLLOUT}.calculate_log_probs=true."
            ],
        ),
        (
            {"trainer.v1.trainer_mode": "colocate_async"},
            [
                "exact: log-probabilities of tokens that the current weights sampled agree in every bit, so "
                "rollout_corr/lag_0/k3_kl is 0; tokens of older weights are counted by lag."
            ],
        ),
        (
            {"trainer.v1.sync.parameter_sync_step": 4},
            [
                "OFF: trainer.v1.sync.parameter_sync_step=4 (all but the first were sampled before an update); "
                f"{ABOVE}. Set trainer.v1.sync.parameter_sync_step=1."
            ],
        ),
        (
            {"skip.rollout.enable": True},
            [f"OFF: skip.rollout.enable=true (another policy sampled them); {ABOVE}. Set skip.rollout.enable=false."],
        ),
        (
            {f"{ROLLOUT}.agent.agent_loop_config_path": "a.yaml"},
            [
                f"OFF: {ROLLOUT}.agent.agent_loop_config_path=a.yaml (a request with its own top_p or temperature has "
                "log-probabilities that the trainer does not compute); k3_kl may be above 0. "
                f"Set {ROLLOUT}.agent.agent_loop_config_path=null."
            ],
        ),
        (
            {"jetrl.unfit_layers": "skip"},
            [
                f"OFF: jetrl.unfit_layers=skip (a BF16 linear layer is not shared); {ABOVE} where a layer is left out. "
                "Set jetrl.unfit_layers=stop."
            ],
        ),
    ],
    ids=str,
)
def test_auto_is_shared_where_only_the_last_bits_may_differ(run, model, settings, lines):
    settings |= {f"{MODEL}.path": model()}
    operations, stderr = run(settings)
    lines = [line.replace("OFF: ", "exactness is OFF: ") for line in lines] or [
        "exact: log-probabilities of rollout and trainer agree in every bit, so k3_kl is 0."
    ]
    assert stderr.splitlines() == [f"jetrl_verl: {line}" for line in lines]
    assert operations == run(settings, "shared")[0] == "shared"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {f"{ACTOR}.ppo_mini_batch_size": 64},
            f"{ACTOR}.ppo_mini_batch_size=64 (weights move between the updates of a step); the ratios of later updates "
            "carry FP8's rounding. If many tokens are clipped, set clip=calibrated, or "
            f"{ACTOR}.ppo_mini_batch_size to data.train_batch_size.",
        ),
        (
            {f"{ACTOR}.ppo_epochs": 2},
            f"{ACTOR}.ppo_epochs=2 (weights move between the updates of a step); the ratios of later updates carry "
            f"FP8's rounding. If many tokens are clipped, set clip=calibrated, or {ACTOR}.ppo_epochs=1.",
        ),
        ({f"{ACTOR}.ppo_epochs": 2, "jetrl.clip": "calibrated"}, ""),
        *(
            (
                {key: True},
                "jetrl.ref=bf16 (the actor runs in FP8); the KL term carries FP8's rounding. Set jetrl.ref=fp8.",
            )
            for key in (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
        ),
        ({f"{ACTOR}.use_kl_loss": True, "jetrl.ref": "fp8"}, ""),
        ({f"{ACTOR}.use_kl_loss": True, f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}, ""),
        (
            {f"{MODEL}.use_fused_kernels": True},
            f"{MODEL}.use_fused_kernels is false instead of true, since the shared operations compute the "
            "log-probabilities, in chunks of rows as well.",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["jet_fp8", "jet_fp8_exact"])
def test_what_an_exact_run_loses_is_one_line(run, model, settings, line, precision):
    operations = "auto" if precision == "jet_fp8" else "shared"
    _, stderr = run(settings | {f"{MODEL}.path": model(), "jetrl.precision": precision}, operations)
    exact, *notes = stderr.splitlines()
    assert exact.startswith("jetrl_verl: exact: ") and notes == ([f"jetrl_verl: note: {line}"] if line else [])


def test_stock_operations_and_baselines(run, model):
    settings = {f"{MODEL}.path": model(), f"{MODEL}.use_liger": True}
    assert run(settings, "stock")[1] == (
        "jetrl_verl: exactness is OFF: jetrl.operations=stock (each side runs its own norms, attention and logits); "
        f"{ABOVE}. Set jetrl.operations=shared.\n"
    )
    assert run(settings)[1] == (
        f"jetrl_verl: exactness is OFF: {MODEL}.use_liger=true (Liger kernels replace norms and MLPs); {ABOVE}. "
        f"Set {MODEL}.use_liger=false.\n"
    )
    baseline = {"jetrl.precision": "fp8_rollout", "jetrl.train": "bf16", f"{ACTOR}.use_kl_loss": True}
    assert run(settings | baseline) == ("stock", "")


def test_the_cpu_platform_makes_auto_stock(run, model, monkeypatch):
    settings = {f"{MODEL}.path": model()}
    assert run(settings | {"jetrl.kv_cache": "fp8"})[0] == "shared"
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert f"exactness is OFF: {TABLE['cpu'].loss(what='VERL_PLATFORM=cpu')}\n" in run(settings)[1]
    with pytest.raises(UnsupportedConfiguration, match="jetrl.kv_cache=fp8 is not supported with .*operations=stock"):
        run(settings | {"jetrl.kv_cache": "fp8"})
    assert run(settings, "shared") == ("shared", "")  # slow, not impossible


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [({"hidden_act": "gelu"}, "the activation gelu"), ({"model_config": {"attention_dropout": 0.1}}, "dropout")],
    ids=str,
)
def test_auto_is_stock_where_the_job_overrides_what_decides(run, model, overrides, reason):
    operations, stderr = run({f"{MODEL}.path": model(), f"{MODEL}.override_config": overrides})
    assert operations == "stock" and reason in stderr


@pytest.mark.parametrize("node", [f"{MODEL}.override_config", f"{MODEL}.override_config.model_config"])
def test_auto_is_shared_where_the_trainer_turns_dropout_off(run, model, node):
    path = model({"model_type": "seed_oss"})
    published = {f"{MODEL}.path": path}
    attention, residual = run(published)[1].splitlines()
    assert attention == (
        f"jetrl_verl: exactness is OFF: the model {path} (the shared operations do not cover attention dropout); "
        f"{ABOVE}. Set {MODEL}.override_config.attention_dropout=0."
    )
    half = published | {f"{node}.attention_dropout": 0}
    assert run(half)[1] == "" and "residual dropout" in residual  # each line is printed once
    assert run(half | {f"{node}.residual_dropout": 0.0})[0] == "shared"


def test_overrides_that_no_operation_reads_keep_auto_shared(run, model):
    settings = {f"{MODEL}.path": model()}
    overrides = {"attn_implementation": "sdpa", "attention_dropout": 0.0, "max_position_embeddings": 4096}
    settings |= {f"{MODEL}.override_config": overrides}
    assert run(settings)[0] == "shared"


def test_auto_is_stock_for_a_missing_model(run):
    assert "exactness is OFF: the model folder /no/model does not exist. Set" in run({f"{MODEL}.path": "/no/model"})[1]


def test_auto_is_shared_for_a_remote_model(run):
    """The driver reads it right before the job starts, when nothing can become stock any more."""
    remote = {f"{MODEL}.path": "hdfs://cluster/model", f"{MODEL}.override_config": {"rms_norm_eps": 1e-5}}
    assert run(remote)[0] == "shared"


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
