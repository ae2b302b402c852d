# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The flag on stock verl: what a precision, a clip and a correction change in the composed config, and what is kept."""

import re
import shutil
from pathlib import Path

import pytest
import verl.trainer.config
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.config import omega_conf_to_dataclass

from jetrl_verl.config.composition import parse, reader
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import PRECISIONS, JetConfig
from jetrl_verl.config.support.limits import PINS
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.config.support.table import stock_because
from jetrl_verl.targets.configs import JetRolloutConfig, JetWorkerEngineConfig

OUR_PRECISIONS = PRECISIONS[1:]
ROLLOUT = "actor_rollout_ref.rollout"
SIZES = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", f"{ROLLOUT}.name=vllm"]
CORRECTIONS = {
    "fp8_rollout_tis": {"rollout_is": "token"},
    "int8_rollout_tis": {"rollout_is": "token"},
    "qurl_fp8": {"rollout_is": "token", "rollout_is_threshold": 1e9},
    "qurl_int8": {"rollout_is": "token", "rollout_is_threshold": 1e9},
}
"""What a precision sets under ``algorithm.rollout_correction``."""

ONE_GPU = f"{ROLLOUT}.tensor_model_parallel_size=1"
"""verl's default is 2, which jet_fp8_exact refuses."""
EXAMPLES = {
    example: re.split(r"\s(?=[+\w.]+=)", words)
    for example, words in yaml.safe_load((Path(__file__).parent / "example_overrides.yaml").read_text()).items()
}
VERL_CONFIG = Path(verl.trainer.config.__file__).parent


def without_precision(config) -> dict:
    """The composed config with everything removed that a precision may add."""
    tree = OmegaConf.to_container(config)
    tree.pop("jetrl", None)
    actor_rollout = tree["actor_rollout_ref"]
    for engine in (actor_rollout["actor"]["fsdp_config"], actor_rollout["ref"]["fsdp_config"], tree["critic"]["fsdp"]):
        engine["_target_"] = "verl.workers.config.FSDPEngineConfig"
        for key in ("jetrl", "jetrl_role"):
            engine.pop(key, None)
    actor_rollout["rollout"]["_target_"] = "verl.workers.config.RolloutConfig"
    actor_rollout["rollout"].pop("custom", None)
    actor_rollout["model"]["lora"]["merge"] = False  # set for a job with adapters
    loss = actor_rollout["actor"]["policy_loss"]
    loss["_target_"] = "verl.workers.config.PolicyLossConfig"
    loss.pop("is_threshold", None)
    if loss["loss_mode"] == "qurl_acr":
        loss["loss_mode"] = "vanilla"
    return tree


@pytest.mark.parametrize("config_name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_without_the_flag_the_config_is_stock(compose, stock, config_name):
    assert compose(config_name=config_name) == stock(config_name=config_name)
    assert compose("precision=bf16", config_name=config_name) == stock(config_name=config_name)


@pytest.mark.parametrize("model_engine", ["megatron", "veomni", "torchtitan"])
def test_bf16_supports_every_engine_of_verl(compose, stock, model_engine):
    overrides = [f"model_engine={model_engine}"]
    assert compose(*overrides, "precision=bf16") == stock(*overrides)


@pytest.mark.parametrize("precision", OUR_PRECISIONS)
def test_a_precision_changes_only_its_own_keys(compose, stock, precision):
    expected = OmegaConf.to_container(stock(ONE_GPU))
    expected["algorithm"]["rollout_correction"].update(CORRECTIONS.get(precision, {}))
    assert without_precision(compose(f"precision={precision}", ONE_GPU)) == expected


@pytest.mark.parametrize(
    ("precision", "train", "rollout", "operations", "correction", "loss", "scaling"),
    [
        ("bf16_shared", "bf16", "bf16", "shared", (None, 2.0), "vanilla", 1.0),
        ("fp8_rollout", "bf16", "fp8", "stock", (None, 2.0), "vanilla", 1.0),
        ("fp8_rollout_tis", "bf16", "fp8", "stock", ("token", 2.0), "vanilla", 1.0),
        ("int8_rollout", "bf16", "int8", "stock", (None, 2.0), "vanilla", 1.0),
        ("int8_rollout_tis", "bf16", "int8", "stock", ("token", 2.0), "vanilla", 1.0),
        ("qurl_fp8", "bf16", "fp8", "stock", ("token", 1e9), "qurl_acr", 1.5),
        ("qurl_int8", "bf16", "int8", "stock", ("token", 1e9), "qurl_acr", 1.5),
        ("jet_fp8", "fp8", "fp8", "stock", (None, 2.0), "vanilla", 1.0),  # verl's default model is missing
        ("jet_fp8_exact", "fp8", "fp8", "shared", (None, 2.0), "vanilla", 1.0),
    ],
)
def test_options_of_each_precision(compose, precision, train, rollout, operations, correction, loss, scaling):
    config = compose(f"precision={precision}", ONE_GPU, *SIZES)
    job = Job.of(config.jetrl)
    assert job.options == JetConfig(precision, train, rollout, operations=operations, invariant_scaling=scaling)
    assert config.jetrl.keys() == {*JetConfig.__dataclass_fields__, "job"}
    assert (
        job.rollout_ranks == 1 and job.versions.keys() == PINS.keys() and bool(job.inexact) == (precision == "jet_fp8")
    )
    assert config.actor_rollout_ref.rollout.calculate_log_probs is True
    set_correction = config.algorithm.rollout_correction
    assert (set_correction.rollout_is, set_correction.rollout_is_threshold) == correction
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == loss and loss in POLICY_LOSS_REGISTRY
    assert actor.engine.jetrl == job
    vllm = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs["vllm"]
    assert vllm["quantization"] == f"jetrl_{rollout}"
    assert vllm["hf_overrides"]["quantization_config"]["quant_method"] == f"jetrl_{rollout}"


@pytest.mark.parametrize("example", EXAMPLES)
def test_verls_example_scripts_compose(compose, stock, example):
    overrides = EXAMPLES[example]
    own_correction = any("rollout_is=" in override for override in overrides)
    own_loss = any("loss_mode=" in override for override in overrides)
    expected = stock(*overrides)
    assert compose(*overrides, "precision=bf16") == expected

    expected = OmegaConf.to_container(expected)
    fused = expected["actor_rollout_ref"]["model"]["use_fused_kernels"]
    uncovered = list(stock_because(reader(compose(*overrides, "precision=jet_fp8"))))
    for precision in ("bf16_shared", "fp8_rollout_tis", "qurl_fp8", "jet_fp8"):
        if precision == "bf16_shared" and uncovered:
            with pytest.raises(ConfigCompositionException, match="jetrl.operations=shared"):
                compose(*overrides, f"precision={precision}")
            continue
        if precision.startswith("qurl") and (own_correction or own_loss):
            with pytest.raises(ConfigCompositionException, match="qurl"):
                compose(*overrides, f"precision={precision}")
            continue
        config = compose(*overrides, f"precision={precision}")
        correction = {} if own_correction else CORRECTIONS.get(precision, {})
        tree = without_precision(config)
        assert tree["algorithm"].pop("rollout_correction") == {
            **expected["algorithm"]["rollout_correction"],
            **correction,
        }
        tree["algorithm"]["rollout_correction"] = expected["algorithm"]["rollout_correction"]
        model = tree["actor_rollout_ref"]["model"]
        assert model["use_fused_kernels"] == (fused and not Job.of(config.jetrl).shared)
        model["use_fused_kernels"] = fused
        assert tree == expected
        assert type(omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine) is JetWorkerEngineConfig
        assert type(omega_conf_to_dataclass(config.actor_rollout_ref.rollout)) is JetRolloutConfig


def test_the_command_line_wins_over_the_group(compose):
    config = compose(
        "precision=fp8_rollout_tis",
        "jetrl.scale_rule=pow2",
        "jetrl.contract_check=false",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_threshold=5",
    )
    assert config.jetrl.scale_rule == "pow2"
    assert config.actor_rollout_ref.actor.fsdp_config.jetrl.scale_rule == "pow2"
    assert config.actor_rollout_ref.rollout.custom.jetrl.contract_check is False
    assert config.algorithm.rollout_correction.rollout_is == "sequence"
    assert config.algorithm.rollout_correction.rollout_is_threshold == 5


def test_keys_that_the_user_adds_are_kept(compose):
    config = compose(
        "precision=jet_fp8",
        "actor_rollout_ref.rollout.name=vllm",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=64",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.max_position_embeddings=4096",
        "+actor_rollout_ref.rollout.custom.mine=1",
        "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    )
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    vllm = rollout.engine_kwargs["vllm"]
    assert vllm["max_num_seqs"] == 64
    assert vllm["hf_overrides"]["max_position_embeddings"] == 4096
    assert vllm["hf_overrides"]["quantization_config"]["quant_method"] == "jetrl_fp8"
    assert rollout.custom["mine"] == 1


@pytest.mark.parametrize("precision", ["jet-fp8", "fp8", "JET_FP8"])
def test_an_unknown_precision_lists_the_choices(compose, precision):
    with pytest.raises(ConfigCompositionException) as refused:
        compose(f"precision={precision}")
    assert str(refused.value) == (
        f"precision={precision} is not a precision. Set one of bf16, bf16_shared, fp8_rollout, fp8_rollout_tis, "
        "int8_rollout, int8_rollout_tis, qurl_fp8, qurl_int8, jet_fp8, jet_fp8_exact."
    )


def test_recipes_that_build_on_ppo_trainer_get_the_flag(tmp_path):
    """A recipe's own primary config, with a verl folder on Hydra's search path: that folder's files are used."""
    checkout = tmp_path / "verl_checkout"
    shutil.copytree(VERL_CONFIG, checkout)
    primary = checkout / "ppo_trainer.yaml"
    primary.write_text(primary.read_text().replace("nccl_timeout: 600", "nccl_timeout: 601"))
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "dapo_trainer.yaml").write_text(
        f"hydra:\n  searchpath:\n    - file://{checkout}\n\n"
        "defaults:\n  - ppo_trainer\n  - _self_\n\n"
        "data:\n  gen_batch_size: ${data.train_batch_size}\n\n"
        "actor_rollout_ref:\n  rollout:\n    calculate_log_probs: false\n"
    )
    with initialize_config_dir(str(recipe), version_base=None):
        plain = hydra_compose("dapo_trainer")
        flagged = hydra_compose("dapo_trainer", ["precision=jet_fp8"])
    assert "jetrl" not in plain and plain.actor_rollout_ref.nccl_timeout == 601
    assert flagged.actor_rollout_ref.nccl_timeout == 601
    assert flagged.jetrl.train == "fp8"
    # The recipe's values come after the group's, as the command line's do.
    assert flagged.actor_rollout_ref.rollout.calculate_log_probs is False


def test_a_recipe_can_fix_its_precision(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        f"hydra:\n  searchpath:\n    - file://{VERL_CONFIG}\n\n"
        "defaults:\n  - ppo_trainer\n  - _self_\n  - override precision: jet_fp8\n"
    )
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert hydra_compose("mine").jetrl.precision == "jet_fp8"
        assert "jetrl" not in hydra_compose("mine", ["precision=bf16"])


def test_other_hydra_programs_are_not_changed(tmp_path):
    (tmp_path / "app.yaml").write_text("defaults:\n  - db: mysql\n  - _self_\nprecision: 16\n")
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "mysql.yaml").write_text("host: localhost\n")
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert hydra_compose("app") == {"db": {"host": "localhost"}, "precision": 16}


def test_old_log_probs_of_the_rollout_use_verls_bypass_mode_and_a_check(compose, own_trainer):
    from jetrl_verl.algorithms import old_log_probs
    from jetrl_verl.patches.batch_hooks import AFTER_OLD_LOG_PROBS

    exact = ["precision=jet_fp8_exact", *SIZES, ONE_GPU]
    computed, reused = compose(*exact), compose(*exact, "jetrl.old_log_probs=rollout")
    assert (computed.algorithm.rollout_correction.bypass_mode, computed.jetrl.old_log_probs) == (False, "compute")
    assert reused.algorithm.rollout_correction.bypass_mode is True
    hooks = vars(own_trainer).get("AFTER_OLD_LOG_PROBS", AFTER_OLD_LOG_PROBS)
    stock = compose("precision=jet_fp8", *SIZES, "jetrl.operations=stock")
    omega_conf_to_dataclass(stock.actor_rollout_ref.rollout)
    assert list(hooks.values()) == [old_log_probs.count_by_lag]
    for config, source in ((computed, "compute"), (reused, "rollout")):
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        assert [hook.__self__.job.options.old_log_probs for hook in hooks.values()] == [source]
    reused.algorithm.rollout_correction.bypass_mode, reused.jetrl.old_log_probs = False, "compute"
    assert reused == computed


def test_fixed_clipping_is_the_default(compose):
    assert compose("precision=jet_fp8") == compose("precision=jet_fp8", "clip=fixed")
    assert compose("clip=fixed") == compose()


@pytest.mark.parametrize("precision", ["jet_fp8", "jet_fp8_exact"])
def test_calibrated_clipping_composes_in_either_order(compose, precision):
    config = compose(f"precision={precision}", "clip=calibrated", *SIZES)
    assert config == compose("clip=calibrated", f"precision={precision}", *SIZES)
    assert (config.jetrl.clip, config.jetrl.clip_interval) == ("calibrated", 20)
    assert config.algorithm.rollout_correction.rollout_is == "token"
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == "vanilla"
    assert actor.engine.jetrl.options.clip == "calibrated"


@pytest.mark.parametrize("precision", ["fp8_rollout_tis", "jet_fp8"])
def test_adaptive_correction_sets_truncated_importance_sampling(compose, precision):
    config = compose(f"precision={precision}", "correction=adaptive", "jetrl.correction_scale=0.01", *SIZES)
    assert config == compose("correction=adaptive", f"precision={precision}", "jetrl.correction_scale=0.01", *SIZES)
    assert (config.jetrl.correction, config.jetrl.correction_scale) == ("adaptive", 0.01)
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2.0)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).jetrl.options.correction == "adaptive"
    assert compose(f"precision={precision}") == compose(f"precision={precision}", "correction=fixed")


@pytest.mark.parametrize("value", [True, float("inf"), float("nan"), "1.5", None])
def test_an_invalid_number_is_refused(value):
    with pytest.raises(UnsupportedConfiguration, match="jetrl.invariant_scaling="):
        parse({"precision": "qurl_fp8", "train": "bf16", "rollout": "fp8", "invariant_scaling": value})
