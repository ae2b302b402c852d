# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations that a precision refuses, composed as by a user, and similar ones that it supports."""

import copy
import json
import math
import re
from functools import cache

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from support_models import refused_value

from jetrl_verl.config import composition
from jetrl_verl.config.composition import reader, resolve
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.support import algorithms
from jetrl_verl.config.support.operations import SHARED_ROWS
from jetrl_verl.config.support.options import OPTION_ROWS
from jetrl_verl.config.support.row import UnsupportedConfiguration, shown
from jetrl_verl.config.support.scopes import (
    ACTOR,
    ATTENTION,
    CALIBRATED_LOSSES,
    CORRECTION,
    LOSS,
    MODEL,
    POLICY_LOSS,
    RATIO_LOSSES,
    ROLLOUT,
    TENSOR_PARALLEL,
    VLLM,
)
from jetrl_verl.config.support.table import COMPOSITION_ROWS, TABLE, refusals, stock_because

SENTENCE = re.compile(r"[^.]\S.* is not supported with .+\. Set .+\.")
ONE_GPU = f"{TENSOR_PARALLEL}=1"


@cache
def composed(*overrides: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides=list(overrides))


def changed(overrides: tuple[str, ...], settings: dict):
    """A composed configuration with other settings, to be resolved again."""
    config = copy.deepcopy(composed(*overrides))
    for key, value in settings.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


# --- every row -------------------------------------------------------------------------------------------------------

STOCK = ("precision=jet_fp8", "jetrl.operations=stock")
SEPARATE = f"trainer.v1.trainer_mode=separate_async {ROLLOUT}.checkpoint_engine.backend=jetrl"
JOBS = (
    STOCK,
    ("precision=jet_fp8", "jetrl.operations=shared"),
    ("precision=jet_fp8", "jetrl.operations=shared", "jetrl.checkpointing=selective"),
    ("precision=jet_fp8_exact",),
    ("precision=jet_fp8_exact", "jetrl.old_log_probs=rollout"),
    ("precision=bf16_shared",),
    ("precision=fp8_rollout",),
    ("precision=fp8_rollout", "jetrl.kv_cache=fp8"),
    ("precision=fp8_rollout", "correction=adaptive"),
    ("precision=int8_rollout",),
    ("precision=qurl_fp8",),
    (*STOCK, "clip=calibrated"),
    (*STOCK, "jetrl.critic=fp8"),
    (*STOCK, "jetrl.gathered=batch", f"{ACTOR}.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2"),
    (*STOCK, f"{ACTOR}.strategy=fsdp"),
    (*STOCK, f"{MODEL}.use_remove_padding=false"),
    (*STOCK, f"+{ATTENTION}=sdpa"),
    (*STOCK, f"+{ATTENTION}=jetrl_varlen"),
    (*STOCK, f"{ROLLOUT}.calculate_log_probs=false"),
    (*STOCK, *SEPARATE.split()),
    (*STOCK, "jetrl.invariant_scaling=1.5"),
)
"""Jobs of every scope in which a setting can be refused."""

SETTINGS = {
    f"{name}-{key}": (TABLE[name], key) for name in (*OPTION_ROWS, *COMPOSITION_ROWS) for key in TABLE[name].settings
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_a_row_is_refused_with_its_message(setting):
    entry, key = SETTINGS[setting]
    value = refused_value(entry, key)
    # Copies are most of the time here: first those of jobs that are in the row's scope already.
    for overrides in sorted(JOBS, key=lambda overrides: not entry.scope.applies(reader(composed(*overrides)))):
        config = changed(overrides, {key: value})
        if entry.scope.applies(reader(config)):
            break
    message = entry.message(reader(config), key=key, value=shown(value))
    assert message in [*refusals(reader(config), OPTION_ROWS), *refusals(reader(config))]
    assert SENTENCE.fullmatch(message) and message.startswith(f"{key}={shown(value)} is not supported with ")
    with pytest.raises(UnsupportedConfiguration):
        resolve(config)


@pytest.mark.parametrize(
    ("entry", "key"),
    [(entry, key) for entry in SHARED_ROWS.values() for key in entry.settings],
    ids=lambda value: str(value)[-40:],
)
def test_auto_is_stock_where_shared_operations_lack_support(entry, key, capsys):
    composition._say.cache_clear()
    config = changed(("precision=jet_fp8",), {"jetrl.operations": "auto", key: refused_value(entry, key)})
    (sentence,) = stock_because(reader(config))
    assert resolve(config).inexact == (sentence,) and config.jetrl.operations == "stock"
    assert f"jetrl_verl: exactness is OFF: {sentence}\n" in capsys.readouterr().err
    assert sentence == (
        f"{key}={shown(refused_value(entry, key))} ({entry.reason}); k3_kl will be above 0. "
        f"Set {key}={entry.settings[key].use}."
    )
    resolve(config)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("compilation_config", {"pass_config": {"enable_sp": True}}),
        ("attention_config", {"flash_attn_version": 2}),
        ("speculative_config", {"method": "ngram"}),
    ],
)
def test_a_vllm_argument_in_json_is_read_like_a_mapping(argument, value):
    example = ("precision=jet_fp8", "jetrl.operations=shared")
    messages = []
    for form in (value, json.dumps(value)):
        with pytest.raises(UnsupportedConfiguration) as refused:
            resolve(changed(example, {f"{VLLM}.{argument}": form}))
        messages.append(str(refused.value))
    assert len(set(messages)) == 1 and f"{VLLM}.{argument}" in messages[0]
    for harmless in ({}, "{}", None):
        resolve(changed(example, {f"{VLLM}.{argument}": harmless}))


# --- sentences as a user reads them, at the command line --------------------------------------------------------------

JET, SHARED, EXACT = "precision=jet_fp8", "precision=bf16_shared", f"precision=jet_fp8_exact {ONE_GPU}"
SENTENCES = {
    f"{JET} model_engine=megatron": "model_engine=megatron is not supported with precision=jet_fp8: training runs "
    "under FSDP. Set model_engine=dp, or precision=bf16.",
    f"{JET} +{VLLM}.tensor_parallel_size=4": f"{VLLM}.tensor_parallel_size=4 is not supported with "
    f"{TENSOR_PARALLEL}=2: the trainer reads the rollout's, which says which layers fit. "
    f"Set {VLLM}.tensor_parallel_size=null.",
    f"{EXACT} {ROLLOUT}.top_p=0.95": f"{ROLLOUT}.top_p=0.95 is not supported with jetrl.operations=shared: the "
    f"trainer's softmax is whole. Set {ROLLOUT}.top_p=1, or precision=jet_fp8 jetrl.operations=stock, or "
    "precision=bf16.",
    f"{JET} jetrl.scale_rule=ue8m0": "jetrl.scale_rule=ue8m0 is not supported with any precision. Set jetrl.scale_rule "
    "to one of fp32, pow2.",
    f"{JET} jetrl.contract_check=1": "jetrl.contract_check=1 is not supported with any precision. Set "
    "jetrl.contract_check to one of true, false.",
    f"{JET} +jetrl.scales=fp32": "jetrl.scales is not supported with any precision: there is no such option. Set "
    f"one of {', '.join(JetConfig.__dataclass_fields__)}.",
    "+jetrl.scale_rule=pow2": "an option of the jetrl node is not supported with precision=bf16. Set precision="
    "<bf16_shared|fp8_rollout|fp8_rollout_tis|int8_rollout|int8_rollout_tis|qurl_fp8|qurl_int8|jet_fp8|jet_fp8_exact>.",
    f"{JET} jetrl.rollout=bf16": "jetrl.rollout=bf16 is not supported with jetrl.train=fp8: it would sample from "
    "another policy than it trains. Set jetrl.rollout=fp8.",
}


@pytest.mark.parametrize("words", SENTENCES)
def test_the_refusal_at_the_command_line(compose, words):
    with pytest.raises(ConfigCompositionException) as refused:
        compose(*words.split())
    assert str(refused.value) == SENTENCES[words]


# Values of a setting that its row does not name; all rows are tested above.
ALSO_REFUSED = [
    (JET, f"+{VLLM}.hf_overrides.quantization_config.quant_method=fp8"),
    (JET, f"{ROLLOUT}.custom=null"),
    (SHARED, "jetrl.operations=auto"),
    (SHARED, "jetrl.train=fp8"),
    (EXACT, "jetrl.train=bf16 jetrl.rollout=int8"),
    (SHARED, "clip=calibrated"),
    (SHARED, f"+{VLLM}.quantization=jetrl_fp8"),
    (EXACT, "jetrl.operations=auto"),
    ("precision=fp8_rollout", "jetrl.correction_scale=0"),
    (JET, "jetrl.clip_interval=2.5"),
]


@pytest.mark.parametrize(("precision", "override"), ALSO_REFUSED)
def test_further_values_are_refused(compose, precision, override):
    with pytest.raises(ConfigCompositionException) as refused:
        compose(*precision.split(), *override.split())
    assert SENTENCE.fullmatch(str(refused.value))


ACCEPTED = [
    (JET, f"{ACTOR}.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2 critic.strategy=fsdp2"),
    (JET, "critic.strategy=megatron"),
    (JET, f"{ACTOR}.fsdp_config.model_dtype=bf16"),
    (JET, f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype:bf16,reduce_dtype:fp32}}"),
    (JET, f"+{VLLM}.kv_cache_dtype=auto +{VLLM}.enforce_eager=true +{VLLM}.tensor_parallel_size=2"),
    (JET, f"+{VLLM}.hf_overrides='{{\"rms_norm_eps\":1e-6}}'"),
    (JET, "trainer.v1.trainer_mode=colocate_async"),
    (JET, f"{SEPARATE} {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=4 actor_rollout_ref.hybrid_engine=false"),
    ("precision=fp8_rollout_tis", f"{SEPARATE} {ROLLOUT}.nnodes=1"),
    (JET, "jetrl.backward=bf16 jetrl.unfit_layers=skip jetrl.ref=fp8 jetrl.critic=fp8"),
    ("precision=fp8_rollout", "jetrl.backward=bf16 jetrl.critic=fp8"),
    ("precision=fp8_rollout", "jetrl.train=fp8"),
    ("precision=int8_rollout_tis", "jetrl.rollout=fp8"),
    (JET, "jetrl.train=bf16 jetrl.rollout=int8"),
    (JET, f"jetrl.operations=stock {ACTOR}.ulysses_sequence_parallel_size=2"),
    (JET, f"jetrl.operations=stock {ACTOR}.ulysses_sequence_parallel_size=2 +{ATTENTION}=jetrl_varlen"),
    (SHARED, f"{ROLLOUT}.tensor_model_parallel_size=4"),
    (SHARED, "jetrl.ref=fp8 jetrl.scale_rule=pow2 jetrl.unfit_layers=skip"),
    (SHARED, "correction=adaptive"),
    (EXACT, f"{ROLLOUT}.temperature=0.6 jetrl.scale_rule=pow2 jetrl.backward=bf16"),
    (EXACT, f"{ROLLOUT}.val_kwargs.top_p=0.7 {ROLLOUT}.val_kwargs.temperature=0"),
    (EXACT, f"+{VLLM}.attention_backend=FLASH_ATTN +{VLLM}.max_num_seqs=64"),
    (EXACT, f"{ROLLOUT}.data_parallel_size=2 {ROLLOUT}.enforce_eager=false"),
    (EXACT, f"{MODEL}.use_remove_padding=true {ACTOR}.use_dynamic_bsz=true {ACTOR}.strategy=fsdp2"),
    ("precision=qurl_fp8", f"{LOSS}={RATIO_LOSSES[0]} {CORRECTION}.rollout_is_threshold='1e9'"),
]


@pytest.mark.parametrize(("precision", "overrides"), ACCEPTED)
def test_these_overrides_are_accepted(compose, precision, overrides):
    assert "jetrl" in compose(*precision.split(), *overrides.split())


# --- losses and clipping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0, -2.0, math.inf, math.nan, True, "2"], ids=repr)
def test_the_truncation_of_weights_is_a_positive_number(threshold):
    """At 0 every weight is 0, and below it every gradient points the other way."""
    key = f"{POLICY_LOSS}.is_threshold"
    with pytest.raises(UnsupportedConfiguration, match=re.escape(f"{key}=")):
        resolve(changed(("precision=qurl_fp8",), {key: threshold}))
    for positive in (1, 0.5, 8.0):
        resolve(changed(("precision=qurl_fp8",), {key: positive}))


def test_every_calibrated_loss_is_accepted_with_calibrated_clipping():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from jetrl_verl.algorithms import losses

    clipped = (JET, "jetrl.operations=stock", "clip=calibrated")
    for loss in set(CALIBRATED_LOSSES) - set(RATIO_LOSSES):
        resolve(changed(clipped, {LOSS: loss}))
    resolve(changed(clipped, {f"{ACTOR}.ppo_mini_batch_size": 1024, f"{ACTOR}.ppo_epochs": 2}))
    assert set(CALIBRATED_LOSSES) <= set(POLICY_LOSS_REGISTRY)
    # The table has its own copy of the bound, since importing it would import verl.
    assert losses.UNTRUNCATED < algorithms._UNTRUNCATED < losses.UNTRUNCATED * 1.002


# --- programs ---------------------------------------------------------------------------------------------------------


def test_programs_can_resolve_a_changed_config(compose):
    config = compose(JET)
    assert resolve(config) == Job.of(config.jetrl)
    OmegaConf.update(config, f"{ROLLOUT}.name", "sglang")
    with pytest.raises(UnsupportedConfiguration, match=f"Set {ROLLOUT}.name=vllm, or precision=bf16"):
        resolve(config)
    assert resolve(OmegaConf.create({"trainer": {"use_v1": False}})) is None


def test_a_job_is_frozen_and_round_trips(compose):
    job = Job.of(compose(JET).jetrl)
    assert Job.of(job.as_dict()) == job == Job.of(job)
    for part, name in ((job, "rollout_ranks"), (job.options, "train")):
        with pytest.raises(AttributeError):
            setattr(part, name, None)
