# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Each row of benchmarks/verl_step.py as verl reads its command line, those among them that a CPU cannot run."""

import argparse
import json
from pathlib import Path

import pytest
import torch
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from benchmarks import engine_alone, verl_step
from benchmarks.published_shapes import PUBLISHED, tiny, write_model
from benchmarks.verl_runs import Results
from jetrl_verl.config import JetConfig
from jetrl_verl.config.environment import check_model
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.rows import Row, parse_row

PRECISIONS = {"bf16_best": "bf16", "verl_fp8": "bf16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(tiny(PUBLISHED["qwen3_4b"]), folder)
    return folder


def composed(row: str, path: Path, **options):
    """The config of a row, after the checks of verl and of this project."""
    chosen = {"model": "qwen3_4b", "response": 4096, "sequences": 64, "steps": 3, "memory": 0.45, "tiny": False}
    chosen |= {"set": [], "gpus": 1, "tp": 1, **options}
    folder, row = Path("/out"), parse_row(row, verl_step.ROWS)
    words = verl_step.words_of(row, argparse.Namespace(**chosen), path, folder / "data", RunPaths(folder / "run"))
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    validate_config(config, need_reference_policy(config), use_critic=False)
    for node in (config.actor_rollout_ref.rollout, config.algorithm):
        omega_conf_to_dataclass(node)
    return config


@pytest.mark.parametrize("on_a_cpu", [False, True])
@pytest.mark.parametrize("row", verl_step.ROWS)
def test_every_row_is_a_job_that_verl_accepts(row, on_a_cpu, model):
    config = composed(row, model, tiny=on_a_cpu)
    precision = PRECISIONS.get(row, row)
    assert OmegaConf.select(config, "jetrl.precision") == (None if precision == "bf16" else precision)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.data.train_batch_size * rollout.n == 64 and actor.ppo_mini_batch_size == config.data.train_batch_size
    assert config.actor_rollout_ref.model.use_remove_padding
    assert actor.ppo_max_token_len_per_gpu >= rollout.max_model_len == 512 + 4096
    assert rollout.enforce_eager == on_a_cpu and rollout.calculate_log_probs
    # Every response has the length that the row names.
    assert rollout.ignore_eos and rollout.response_length == 4096
    assert config.trainer.n_gpus_per_node == rollout.tensor_model_parallel_size == 1


@pytest.mark.parametrize("on_a_cpu", [False, True])
def test_several_gpus_are_two_words_and_fit_the_batch(model, on_a_cpu):
    config = composed("jet_fp8_exact", model, gpus=4, tp=2, tiny=on_a_cpu)
    assert config.trainer.n_gpus_per_node == 4 and engine_alone.replicas(config) == 2
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    assert OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus") == (4 if on_a_cpu else None)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--gpus 3 --tp 2", "Set a --tp that divides --gpus."),
        ("--gpus 8 --tp 8 --model r1_distill_qwen_1_5b --rows bf16", "12 heads"),
        ("--gpus 2 --tp 2 --model qwen3_moe_3b --rows jet_fp8", "Set --model qwen3_30b_a3b --layers 4."),
        ("--gpus 8 --sequences 40", "Set a multiple of 32."),
        ("--gpus 9999 --rows bf16 --sequences 39996", "GPUs of this machine"),
        ("--rows jet_fp9", "'jet_fp9' is not a row. Choose from bf16"),
        ("--rows bf16 --engine-rows jet_fp8+", "'jet_fp8+' is not a row"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(words, reason, tmp_path, capsys):
    with pytest.raises(SystemExit):
        verl_step.main([str(tmp_path / "out"), *words.split()])
    assert reason in capsys.readouterr().err and not list(tmp_path.glob("out/*"))


def test_rows_that_quantize_nothing_go_over_ranks_that_others_do_not(model):
    options = argparse.Namespace(model="qwen3_moe_3b", gpus=2, tp=2, sequences=64)
    assert verl_step.arranged(options, [Row("bf16")]) == ""
    assert "[1024, 192]" in verl_step.arranged(options, [Row("bf16"), Row("verl_fp8")])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_model(tiny(PUBLISHED["qwen3_moe_3b"]), folder)
    return folder


@pytest.mark.parametrize("row", ["bf16", "bf16_best", "verl_fp8", "fp8_rollout", "jet_fp8", "jet_fp8_exact"])
def test_a_mixture_is_a_job_that_verl_accepts(row, mixture):
    config = composed(row, mixture, model="qwen3_moe_3b", response=1024)
    assert OmegaConf.select(config, "jetrl.precision") == (None if PRECISIONS.get(row, row) == "bf16" else row)
    assert not config.actor_rollout_ref.actor.fsdp_config.param_offload
    if row == "jet_fp8_exact":
        options = JetConfig.from_node(OmegaConf.to_container(config.jetrl, resolve=True))
        check_model(str(mixture), options, 1, True)


def test_a_mixture_has_the_proportions_and_the_size_that_it_says():
    from transformers import AutoConfig, AutoModelForCausalLM

    def parameters(name: str) -> int:
        fields = PUBLISHED[name].fields
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **fields))
        return sum(parameter.numel() for parameter in model.parameters())

    assert parameters("qwen3_30b_a3b") == 30_532_122_624
    assert 3.0e9 < parameters("qwen3_moe_3b") < 3.2e9
    large, small = (PUBLISHED[name].fields for name in ("qwen3_30b_a3b", "qwen3_moe_3b"))
    for name in ("moe_intermediate_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        assert small[name] / small["hidden_size"] == large[name] / large["hidden_size"]
    assert all(small[name] == large[name] for name in ("num_experts", "num_experts_per_tok", "head_dim"))
    for tp in (1, 2):
        assert all(plan.quantized for plan in plan_linears({"model_type": "qwen3_moe", **large}, tp).values())
    assert all(plan.quantized for plan in plan_linears({"model_type": "qwen3_moe", **small}).values())


def test_the_row_that_no_mixture_has_says_why():
    assert "FP8 flow alone" in verl_step.lacking("bf16_shared", False, "qwen3_moe_3b")
    assert not verl_step.lacking("bf16_shared", False, "qwen3_4b")


def test_the_rows_differ_where_they_say(model):
    best, fp8 = composed("bf16_best", model), composed("verl_fp8", model)
    assert best.actor_rollout_ref.model.use_liger and best.actor_rollout_ref.rollout.quantization is None
    assert best.actor_rollout_ref.model.override_config.attn_implementation == JETRL_ATTENTION
    assert fp8.actor_rollout_ref.rollout.quantization == "fp8" and not fp8.actor_rollout_ref.model.use_liger
    assert composed("bf16_shared", model).jetrl.operations == "shared"


def test_what_is_set_beside_a_row_is_in_its_job(model):
    cache = ["jetrl.operations=shared", "jetrl.kv_cache=fp8"]
    assert composed("jet_fp8", model, set=cache).jetrl.kv_cache == "fp8"
    assert composed("jet_fp8", model).jetrl.kv_cache == "bf16"


def test_a_row_with_settings_is_the_row_with_these_overrides(model):
    assert composed("fp8_rollout+jetrl.kv_cache=fp8", model).jetrl.kv_cache == "fp8"
    config = composed("jet_fp8+jetrl.kv_cache=fp8+jetrl.operations=shared", model, set=["data.seed=5"])
    assert (config.jetrl.kv_cache, config.jetrl.operations, config.data.seed) == ("fp8", "shared", 5)
    assert config.trainer.experiment_name == "jet_fp8-jetrl.kv_cache-fp8-jetrl.operations-shared"


def test_a_response_of_another_length_fails_the_row():
    assert verl_step.other_length({"steps": 3, "response_length": 1024.0}, 1024) == []
    assert verl_step.other_length({"steps": 0}, 1024) == []
    (error,) = verl_step.other_length({"steps": 3, "response_length": 1023.5}, 1024)
    assert error == "responses have 1023.50 tokens in the mean and were to have 1024"


def test_where_it_is_installed_verls_default_takes_flash_attention(model, monkeypatch):
    monkeypatch.setattr(verl_step.importlib.util, "find_spec", lambda name: object())
    assert "attn_implementation" not in composed("bf16", model).actor_rollout_ref.model.override_config
    assert composed("bf16_best", model).actor_rollout_ref.model.override_config.attn_implementation == JETRL_ATTENTION


def test_over_enough_gpus_nothing_is_kept_on_the_host(model):
    eight = composed("bf16", model, model="qwen3_8b", response=1024, gpus=4)
    assert not eight.actor_rollout_ref.actor.fsdp_config.param_offload
    assert eight.actor_rollout_ref.actor.optim.optimizer == "AdamW"


def test_what_does_not_fit_one_gpu_is_kept_on_the_host(model):
    long, eight = composed("jet_fp8", model, response=16384), composed("bf16", model, model="qwen3_8b", response=1024)
    for config in (long, eight):
        assert config.actor_rollout_ref.actor.fsdp_config.param_offload
    assert eight.actor_rollout_ref.actor.optim.optimizer == "AdamW8bit"
    assert long.actor_rollout_ref.actor.optim.optimizer == "AdamW"


def test_a_row_that_cannot_run_says_why(monkeypatch):
    assert "need a GPU" in verl_step.lacking("bf16_best", True) and "need a GPU" in verl_step.lacking("verl_fp8", True)
    monkeypatch.setattr(verl_step.importlib.util, "find_spec", lambda name: None)
    assert "pip install liger-kernel" in verl_step.lacking("bf16_best", False)
    assert not any(verl_step.lacking(row, False) for row in verl_step.ROWS if row != "bf16_best")


def test_the_rate_of_a_generation_and_verls_share_of_the_engine():
    rates = verl_step.derived({"gen_s": 8.0, "response_length": 100.0, "engine_tokens_per_s": 1000.0}, 64)
    assert rates == {"gen_tokens_per_s": 800.0, "of_the_engine": 0.8}
    assert verl_step.derived({"steps": 0}, 64) == {}


def test_a_record_from_before_several_gpus_is_read_as_one_gpus_and_not_added_to(tmp_path):
    """Its responses were to have one length, and a random policy seldom ended one."""
    file = Path(verl_step.__file__).parent / "results" / "verl_step_mixture_h200.json"
    held = json.loads(file.read_text())
    settings = {key: held[key] for key in ("sequences", "steps", "memory", "tiny")}
    build = {"gpu": held["gpu"]}
    before = Results(file, verl_step.NAMES, settings | {"exact_length": False}, build, verl_step.BEFORE)
    assert len(before.runs) == len(held["runs"]) and {(run["gpus"], run["tp"]) for run in before.runs} == {(1, 1)}
    now = Results(tmp_path / "now.json", verl_step.NAMES, settings | {"exact_length": True}, build, verl_step.BEFORE)
    with pytest.raises(ValueError, match="exact_length False and not True"):
        now.add(file)
