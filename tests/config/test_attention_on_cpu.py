# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The attention that the driver chooses for the trainer's models, with and without flash-attn."""

import copy

import pytest
from omegaconf import OmegaConf
from support_models import MODELS

from jetrl_verl.config import attention, composition
from jetrl_verl.config.attention import check_attention_package
from jetrl_verl.config.composition import reader, resolve
from jetrl_verl.config.job import Job
from jetrl_verl.config.model import check_models
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.config.support.scopes import ACTOR, ATTENTION, CRITIC_MODEL, MODEL, REF, ULYSSES_OF_THE_CRITIC

CRITICS = f"{CRITIC_MODEL}.override_config.attn_implementation"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
NO_CRITIC = {"critic.enable": False}


@pytest.fixture
def flash_attention(monkeypatch):
    """Callable (packages that are installed), of which flash-attn is none by default."""

    def install(*packages: str) -> None:
        monkeypatch.setattr(attention, "installed_version", lambda package: "1" if package in packages else None)

    install()
    return install


@pytest.fixture
def job(compose, flash_attention, model):
    """Callable (settings, changes of both models' config.json, precision) -> (config, job), resolved."""

    def _job(settings: dict, changes: dict | None = None, precision: str = "jet_fp8") -> tuple:
        paths = dict.fromkeys((f"{MODEL}.path", f"{CRITIC_MODEL}.path"), model(changes))
        composition._say.cache_clear()
        words = [f"++{key}={value}" for key, value in {**paths, **settings}.items()]
        config = compose(f"precision={precision}", "actor_rollout_ref.rollout.tensor_model_parallel_size=1", *words)
        return config, Job.of(config.jetrl)

    return _job


def names(config) -> tuple:
    return OmegaConf.select(config, ATTENTION), OmegaConf.select(config, CRITICS)


PRECISIONS = ("bf16_shared", "fp8_rollout", "int8_rollout", "qurl_fp8", "jet_fp8", "jet_fp8_exact")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_flash_attn_every_precision_runs_the_plugins_attention(job, precision, capsys):
    config, resolved = job({}, precision=precision)
    assert names(config) == ("jetrl_varlen", "jetrl_varlen") and not resolved.flash_attention
    assert (
        f"jetrl_verl: note: flash-attn is not installed, so the plugin sets {ATTENTION}=jetrl_varlen, "
        f"{CRITICS}=jetrl_varlen.\n"
    ) in capsys.readouterr().err
    check_attention_package(precision, reader(config))
    again = copy.deepcopy(config)
    assert resolve(again) == resolved and again == config


@pytest.mark.parametrize(
    ("settings", "changes", "chosen"),
    [
        (NO_CRITIC, {}, ("jetrl_varlen", None)),
        ({"algorithm.adv_estimator": "grpo", ULYSSES: 2}, {}, ("jetrl_varlen", None)),
        ({f"{MODEL}.use_remove_padding": False}, {}, ("jetrl_varlen", "jetrl_varlen")),
        ({ATTENTION: "sdpa"}, {}, ("sdpa", "jetrl_varlen")),
        ({CRITICS: "eager"}, {}, ("jetrl_varlen", "eager")),
        ({}, MODELS["sliding_window"], ("sdpa", "sdpa")),
        ({f"{MODEL}.override_config.attention_dropout": 0.0}, MODELS["attention_dropout"], ("jetrl_varlen", "sdpa")),
        ({}, {"model_type": "gemma3_text"}, ("sdpa", "sdpa")),
        ({f"{MODEL}.path": "hdfs://cluster/model", **NO_CRITIC}, {}, ("jetrl_varlen", None)),
        ({ULYSSES: 2, ULYSSES_OF_THE_CRITIC[0]: 2}, MODELS["sliding_window"], (None, None)),
    ],
)
def test_the_choice_covers_the_model_and_leaves_what_the_user_named(job, settings, changes, chosen):
    assert names(job(settings, changes, "fp8_rollout")[0]) == chosen


def test_flash_attn_stays_where_it_is_installed(job, flash_attention, monkeypatch, capsys):
    flash_attention("flash-attn")
    config, resolved = job({})
    assert names(config) == (None, None) and resolved.flash_attention
    check_attention_package("jet_fp8", reader(config))
    assert "flash-attn" not in capsys.readouterr().err
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert names(job({})[0]) == ("jetrl_varlen", "jetrl_varlen")
    assert "jetrl_verl: note: flash-attn runs on no CPU, so " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "changes", "key", "remedy"),
    [
        ({ATTENTION: "flash_attention_2"}, {}, ATTENTION, f"{ATTENTION}=jetrl_varlen"),
        ({CRITICS: "flash_attention_2"}, {}, CRITICS, f"{CRITICS}=jetrl_varlen"),
        ({ATTENTION: "flash_attention_2"}, MODELS["sliding_window"], ATTENTION, f"{ATTENTION}=sdpa"),
        ({ULYSSES: 2}, MODELS["sliding_window"], ATTENTION, f"{ULYSSES}=1 and {ULYSSES.replace(ACTOR, REF)}=1"),
    ],
)
def test_an_attention_that_does_not_exist_is_refused_in_the_driver(
    job, flash_attention, settings, changes, key, remedy
):
    config, resolved = job(settings, changes, "fp8_rollout")
    assert resolved.flash_attention
    with pytest.raises(UnsupportedConfiguration) as refused:
        check_attention_package("fp8_rollout", reader(config))
    assert str(refused.value) == (
        f"{key}=flash_attention_2 is not supported with precision=fp8_rollout: flash-attn is not installed. "
        f"Install flash-attn, or set {remedy}."
    )
    flash_attention("kernels")  # transformers then takes that of its hub
    check_attention_package("fp8_rollout", reader(config))


def test_a_critic_that_the_named_attention_does_not_cover_is_refused(job):
    config, resolved = job({CRITICS: "jetrl_varlen", ATTENTION: "sdpa"}, MODELS["sliding_window"], "fp8_rollout")
    with pytest.raises(UnsupportedConfiguration, match=f"whose layers attend to windows, .* Set {CRITICS}=sdpa.$"):
        check_models(resolved, reader(config))
