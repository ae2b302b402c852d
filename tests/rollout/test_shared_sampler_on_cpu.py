# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""When the shared sampler draws, and which log-probabilities it reports: the shared function's over the whole softmax,
vLLM's for requests that cut the distribution."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from jetrl_verl import kernels
from jetrl_verl.rollout.sampler import SharedSampler, SharedSamplerV2
from jetrl_verl.rollout.vllm_compat import SamplingStates

ROWS, VOCABULARY = 5, 64
CUT = 2
"""The row whose request cuts the distribution."""


def row_wise(plain: float, cut: float, dtype=torch.float32) -> torch.Tensor:
    values = torch.full((ROWS,), plain, dtype=dtype)
    values[CUT] = cut
    return values


def metadata(**changes) -> SamplingMetadata:
    """Five requests at temperature 0.7, each with its own generator and no other setting."""
    defaults = dict(
        temperature=torch.full((ROWS,), 0.7),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={row: torch.Generator().manual_seed(row) for row in range(ROWS)},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=torch.full((ROWS, 1), VOCABULARY),
        frequency_penalties=torch.zeros(ROWS),
        presence_penalties=torch.zeros(ROWS),
        repetition_penalties=torch.ones(ROWS),
        output_token_ids=[[1, 2, 3]] * ROWS,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return SamplingMetadata(**(defaults | changes))


def forbidden() -> torch.Tensor:
    mask = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    mask[CUT, : VOCABULARY // 2] = True
    return mask


def biased() -> LogitsProcessors:
    processor = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    processor.biases = {CUT: {5: 30.0}}
    processor.bias_tensor = torch.tensor([30.0])
    processor.logits_slice = (torch.tensor([CUT], dtype=torch.int32), torch.tensor([5], dtype=torch.int32))
    return LogitsProcessors([processor])


class Unknown(LogitBiasLogitsProcessor):
    """Changes every row."""

    def __init__(self) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * 2


REQUESTS = {
    "top_p": lambda: dict(top_p=row_wise(1, 0.5)),
    "top_k": lambda: dict(top_k=row_wise(VOCABULARY, 3, torch.int32)),
    "presence_penalty": lambda: dict(no_penalties=False, presence_penalties=row_wise(0, 1.5)),
    "allowed_token_ids": lambda: dict(allowed_token_ids_mask=forbidden()),
    "bad_words": lambda: dict(bad_words_token_ids={CUT: [[7]]}),
    "logit_bias": lambda: dict(logitsprocs=biased()),
}


def sampled(sampler: type[Sampler], logits: torch.Tensor, requests: SamplingMetadata):
    output = sampler(logprobs_mode="processed_logprobs").forward(logits.clone(), requests)
    return output.logprobs_tensors.logprob_token_ids.to(torch.int64), output.logprobs_tensors.logprobs


@pytest.mark.parametrize("request_name", [None, *REQUESTS])
def test_only_a_request_that_cuts_the_distribution_has_vllms_log_probs(request_name):
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    settings = REQUESTS[request_name] if request_name else dict
    stock_tokens, stock = sampled(Sampler, logits, metadata(**settings()))
    tokens, log_probs = sampled(SharedSampler, logits, metadata(**settings()))
    assert torch.equal(tokens, stock_tokens)
    whole = kernels.log_probs(logits, tokens, torch.full((ROWS,), 0.7))
    plain = torch.ones(ROWS, dtype=torch.bool)
    plain[CUT] = request_name is None
    assert torch.equal(log_probs[plain], whole[plain])
    assert torch.equal(log_probs[~plain], stock[~plain])
    assert torch.allclose(whole[plain], stock[plain], atol=1e-5)
    if request_name not in (None, "bad_words"):  # one token, whose share is small
        assert not torch.allclose(whole[~plain], stock[~plain], atol=1e-3)


def test_with_an_unknown_processor_every_request_has_vllms_log_probs():
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    unknown = LogitsProcessors([object.__new__(Unknown)])
    shared, stock = (sampled(kind, logits, metadata(logitsprocs=unknown))[1] for kind in (SharedSampler, Sampler))
    assert torch.equal(shared, stock)


def idle() -> LogitsProcessors:
    """The processors of every engine of vLLM, with nothing to do."""
    min_p, bias, min_tokens = map(
        object.__new__, (MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor)
    )
    min_p.min_p_count, bias.biases, min_tokens.min_toks = 0, {}, {}
    return LogitsProcessors([min_p, bias, min_tokens])


def with_min_p() -> LogitsProcessors:
    processors = idle()
    processors.argmax_invariant[0].min_p_count = 1
    processors.argmax_invariant[0].min_p = torch.tensor([[0.2]] * ROWS)
    return processors


def rollouts(**changes) -> SamplingMetadata:
    """Five requests of a rollout with verl's settings."""
    return metadata(**(dict(generators={}, logitsprocs=idle()) | changes))


def test_a_rollouts_step_is_drawn_without_changing_the_logits():
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    torch.manual_seed(5)
    output = SharedSampler(logprobs_mode="processed_logprobs").forward(logits, rollouts())
    torch.manual_seed(5)
    bits = torch.empty((2, ROWS), dtype=torch.int64).random_()
    temperature = torch.full((ROWS,), 0.7)
    tokens, _ = kernels.draw_tokens(logits, temperature, *bits)
    assert torch.equal(logits, before)
    reported = output.logprobs_tensors
    for ids in (output.sampled_token_ids, reported.logprob_token_ids):
        assert ids.dtype == torch.int32 and torch.equal(ids, tokens[:, None].to(torch.int32))
    assert torch.equal(reported.logprobs, kernels.log_probs(logits, tokens[:, None], temperature))
    ranks = (logits >= logits.gather(1, tokens[:, None])).sum(dim=1)
    assert torch.equal(reported.selected_token_ranks, ranks)
    without = SharedSampler(logprobs_mode="processed_logprobs").forward(logits, rollouts(max_num_logprobs=None))
    assert without.logprobs_tensors is None and without.sampled_token_ids.shape == (ROWS, 1)


OTHERWISE = REQUESTS | {
    "seeds": lambda: dict(generators={CUT: torch.Generator().manual_seed(1)}),
    "greedy": lambda: dict(temperature=None, all_greedy=True, all_random=False),
    "one greedy request": lambda: dict(temperature=row_wise(0.7, 0.0), all_random=False),
    "top log-probabilities": lambda: dict(max_num_logprobs=2),
    "log-probabilities of tokens": lambda: dict(logprob_token_ids={CUT: [1, 2]}),
    "min_p": lambda: dict(logitsprocs=with_min_p()),
    "an unknown processor": lambda: dict(logitsprocs=LogitsProcessors([object.__new__(Unknown)])),
}


@pytest.mark.parametrize("request_name", OTHERWISE)
def test_any_other_step_is_left_to_vllm(request_name, monkeypatch):
    """The same random numbers give the same tokens."""
    monkeypatch.setattr(SharedSampler, "draw", None)
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    tokens = []
    for sampler in (Sampler, SharedSampler):
        torch.manual_seed(7)
        made = sampler(logprobs_mode="processed_logprobs")
        made.topk_topp_sampler.forward = made.topk_topp_sampler.forward_native
        tokens.append(made.forward(logits.clone(), rollouts(**OTHERWISE[request_name]())).sampled_token_ids)
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    "changed", [dict(logprobs_mode="raw_logprobs"), dict(logprobs_mode="processed_logprobs", use_fp64_gumbel=True)]
)
def test_a_sampler_with_other_settings_leaves_the_draw_to_vllm(changed, monkeypatch):
    monkeypatch.setattr(SharedSampler, "draw", None)
    made = SharedSampler(**changed)
    made.topk_topp_sampler.forward = made.topk_topp_sampler.forward_native
    made.forward(torch.randn(ROWS, VOCABULARY), rollouts())


def test_a_thinking_budget_leaves_the_step_to_vllm():
    made = SharedSampler(logprobs_mode="processed_logprobs")
    for tracked in (False, True):
        holder = SimpleNamespace(has_tracked_requests=lambda tracked=tracked: tracked)
        step = rollouts(thinking_budget_state_holder=holder)
        assert made._draws(torch.zeros(ROWS, VOCABULARY), step) is not tracked


# --- the second model runner ----------------------------------------------------------------------------------------


class OnTheHost(SimpleNamespace):
    """Values of all requests, three of which are in the step."""

    @property
    def gpu(self) -> torch.Tensor:
        return torch.from_numpy(self.np)


IN_STEP = np.array([4, 0, 2])


def second_sampler(**changes) -> SharedSamplerV2:
    sampler = object.__new__(SharedSamplerV2)
    states = dict(temperature=0.7, top_p=1.0, min_p=0.0, top_k=VOCABULARY, seeds=0, num_logprobs=0, seeds_set=False)
    numbers = {}
    for name, value in states.items():
        dtype = {"top_k": np.int32, "seeds": np.int64}.get(name, np.float32 if isinstance(value, float) else None)
        numbers[name] = np.full(ROWS, value, dtype=dtype)
        numbers[name][IN_STEP[1]] = changes.get(name, value)
    numbers["seeds"] = np.arange(ROWS)
    sampler.sampling_states = object.__new__(SamplingStates)
    for name, values in numbers.items():
        plain = name in ("num_logprobs", "seeds_set")
        setattr(sampler.sampling_states, name, values if plain else OnTheHost(np=values))
    sampler.sampling_states.vocab_size = VOCABULARY
    nothing = np.zeros(ROWS, dtype=bool)
    for state, name in (("penalties_state", "use_penalty"), ("logit_bias_state", "use_logit_bias")):
        flags = nothing.copy()
        flags[IN_STEP[1]] = changes.get(name, False)
        setattr(sampler, state, SimpleNamespace(**{name: flags}))
    bad_words = OnTheHost(np=nothing.astype(np.int32) + changes.get("bad_words", 0))
    sampler.bad_words_state = SimpleNamespace(num_bad_words=bad_words)
    token_ids = changes.get("token_ids", 0)
    sampler.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda rows: token_ids)
    sampler.req_states = SimpleNamespace(prefill_len=OnTheHost(np=np.zeros(ROWS)))
    for name, value in (("logprobs_mode", "processed_logprobs"), ("compute_nans", False), ("use_fp64_gumbel", False)):
        setattr(sampler, name, changes.get(name, value))
    return sampler


def step() -> SimpleNamespace:
    rows = torch.from_numpy(IN_STEP)
    return SimpleNamespace(
        **dict(idx_mapping_np=IN_STEP, idx_mapping=rows, expanded_idx_mapping=rows, num_reqs=len(rows)),
        **dict(positions=torch.arange(20) * 3, logits_indices=torch.tensor([2, 9, 11]), cu_num_logits=None),
        seq_lens=torch.tensor([5, 6, 7], dtype=torch.int32),
    )


def test_the_second_runner_draws_from_a_requests_seed_and_position(monkeypatch):
    counted = torch.ones(3), torch.zeros(3)
    monkeypatch.setattr("jetrl_verl.rollout.vllm_compat.get_num_sampled_and_rejected", lambda *args: counted)
    logits = 3 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    output = second_sampler()(logits, step())
    temperature = torch.full((3,), 0.7)
    tokens, _ = kernels.draw_tokens(logits, temperature, torch.from_numpy(IN_STEP), torch.tensor([6, 27, 33]))
    assert torch.equal(output.sampled_token_ids, tokens[:, None])
    assert (output.num_sampled, output.num_rejected) == counted and output.num_nans is None
    reported = output.logprobs_tensors
    assert torch.equal(reported.logprobs, kernels.log_probs(logits, tokens[:, None], temperature))
    assert torch.equal(reported.logprob_token_ids, tokens[:, None]) and reported.cu_num_generated_tokens is None
    assert torch.equal(reported.selected_token_ranks, (logits >= logits.gather(1, tokens[:, None])).sum(dim=1))
    without = second_sampler()
    without.sampling_states.num_logprobs[:] = -1
    assert without(logits, step()).logprobs_tensors is None


@pytest.mark.parametrize(
    "changed",
    [
        *(dict(temperature=0.0), dict(top_p=0.9), dict(min_p=0.1), dict(top_k=5), dict(seeds_set=True)),
        *(dict(num_logprobs=2), dict(token_ids=3), dict(use_penalty=True), dict(use_logit_bias=True)),
        *(dict(bad_words=1), dict(logprobs_mode="raw_logprobs"), dict(compute_nans=True), dict(use_fp64_gumbel=True)),
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_the_second_runner_leaves_any_other_step_to_vllm(changed):
    logits = torch.zeros(3, VOCABULARY)
    sampler = second_sampler(**changed)
    assert second_sampler()._altered(logits, step()) is None and second_sampler()._draws(logits, step())
    assert sampler._altered(logits, step()) is not None or not sampler._draws(logits, step())
    assert not second_sampler()._draws(logits.bfloat16(), step())
    assert not second_sampler()._draws(torch.zeros(6, VOCABULARY), step()), "more than one token a request"
