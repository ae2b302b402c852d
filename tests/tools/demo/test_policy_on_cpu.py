# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's policy, tokenizer and warm-up in transformers and in verl's agent loop."""

import pytest
import torch

from jetrl_verl.models.plan import plan_linears
from jetrl_verl.tools.demo.overrides import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS
from jetrl_verl.tools.demo.policy import CHARACTERS, POLICIES, PolicyConfig, build_model, build_tokenizer
from jetrl_verl.tools.demo.task import Problem, TaskConfig, make_splits
from jetrl_verl.tools.demo.warmup import IGNORED_LABEL, WarmupConfig, encode, prompt_ids, solution_probability, warm_up

TINY = PolicyConfig(hidden_size=128, layers=1, heads=1, intermediate_size=128)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("text", [CHARACTERS, Problem(8737, 7219).solution, "user ####\n  two  spaces", ""])
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_verl_builds_the_same_prompt(tokenizer):
    from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder

    problem = Problem(8737, 7219)
    turn = [{"role": "user", "content": problem.prompt}]
    assert QwenContinuousTokenBuilder(tokenizer).build_initial_tokens(turn) == prompt_ids(problem, tokenizer)


def test_every_problem_fits_the_token_budget(tokenizer):
    problem = Problem(999, 999)  # the longest sum; all prompts have one length
    assert len(prompt_ids(problem, tokenizer)) <= MAX_PROMPT_TOKENS
    assert len(tokenizer.encode(problem.solution)) + 1 <= MAX_RESPONSE_TOKENS


def test_a_hybrid_has_the_class_that_is_published_and_is_quantized_but_for_its_gates(tokenizer):
    model = build_model(POLICIES["hybrid"], tokenizer)
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    assert {plan.kind for plan in plan_linears(model.config).values() if not plan.quantized} == {"ba"}


@pytest.mark.parametrize("wrong", [{"hidden_size": 192}, {"head_dim": 64}, {"intermediate_size": 0}])
def test_dimensions_off_the_fp8_block_are_refused(wrong):
    with pytest.raises(ValueError, match="multiple of 128"):
        PolicyConfig(**wrong)


def test_weights_depend_on_the_seed_and_keep_the_global_random_state(tokenizer):
    state = torch.get_rng_state()
    first, second = build_model(TINY, tokenizer), build_model(TINY, tokenizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_labels_cover_the_solution_and_the_end_of_turn_only(tokenizer):
    problems = [Problem(1000, 1000), Problem(9999, 9999)]  # answers of four and five digits: one row is padded
    ids, labels = encode(problems, tokenizer)
    for row, problem in enumerate(problems):
        labelled = labels[row][labels[row] != IGNORED_LABEL]
        assert tokenizer.decode(labelled) == problem.solution + "<|im_end|>"
        assert torch.equal(ids[row][labels[row] != IGNORED_LABEL], labelled)
    assert ids[0, -1] == tokenizer.pad_token_id and labels[0, -1] == IGNORED_LABEL


def test_solution_probability_of_a_uniform_model(tokenizer):
    model = build_model(TINY, tokenizer)
    torch.nn.init.zeros_(model.lm_head.weight)
    ids, labels = encode([Problem(1, 1)], tokenizer)
    tokens = int((labels != IGNORED_LABEL).sum())
    expected = float(len(tokenizer)) ** -tokens
    assert solution_probability(model, ids, labels) == pytest.approx(expected, rel=1e-3)


def test_warm_up_stops_at_its_target_and_repeats_by_seed(tokenizer):
    problems = make_splits(TaskConfig(digits=2, warmup=1000, train=1, test=1))["warmup"]
    config = WarmupConfig(target=1e-6, max_steps=400, batch_size=16, check_problems=32)
    first, second = (
        warm_up(build_model(TINY, tokenizer), tokenizer, problems, config, lambda line: None) for _ in range(2)
    )
    assert first["warmup_accuracy"] >= config.target and first["warmup_steps"] < config.max_steps
    assert all(first[name] == second[name] for name in ("warmup_steps", "warmup_accuracy"))
