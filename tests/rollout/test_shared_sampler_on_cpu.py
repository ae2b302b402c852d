# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whose log-probabilities the shared sampler reports: ours of the whole softmax, vLLM's where a request's is cut."""

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from jetrl_verl import kernels
from jetrl_verl.rollout.sampler import SharedSampler

ROWS, VOCABULARY = 5, 64
CUT = 2
"""The row whose request asks for something."""


def row_wise(plain: float, cut: float, dtype=torch.float32) -> torch.Tensor:
    values = torch.full((ROWS,), plain, dtype=dtype)
    values[CUT] = cut
    return values


def metadata(**changes) -> SamplingMetadata:
    """Five requests at temperature 0.7, each with a generator of its own, nothing else asked for."""
    plain = dict(
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
    return SamplingMetadata(**(plain | changes))


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


def sampled(sampler: type[Sampler], logits: torch.Tensor, asked: SamplingMetadata):
    output = sampler(logprobs_mode="processed_logprobs").forward(logits.clone(), asked)
    return output.logprobs_tensors.logprob_token_ids.to(torch.int64), output.logprobs_tensors.logprobs


@pytest.mark.parametrize("request_name", [None, *REQUESTS])
def test_a_request_that_cuts_the_distribution_keeps_vllms_and_the_others_get_ours(request_name):
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    asked = REQUESTS[request_name] if request_name else dict
    stock_tokens, stock = sampled(Sampler, logits, metadata(**asked()))
    tokens, found = sampled(SharedSampler, logits, metadata(**asked()))
    assert torch.equal(tokens, stock_tokens)
    whole = kernels.log_probs(logits, tokens, torch.full((ROWS,), 0.7))
    plain = torch.ones(ROWS, dtype=torch.bool)
    plain[CUT] = request_name is None
    assert torch.equal(found[plain], whole[plain])
    assert torch.equal(found[~plain], stock[~plain])
    assert torch.allclose(whole[plain], stock[plain], atol=1e-5)
    if request_name not in (None, "bad_words"):  # of one token, which changes the rest by its share alone
        assert not torch.allclose(whole[~plain], stock[~plain], atol=1e-3)


def test_a_processor_that_we_do_not_know_leaves_vllms_log_probabilities_everywhere():
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    asked = lambda: metadata(logitsprocs=LogitsProcessors([object.__new__(Unknown)]))  # noqa: E731
    assert torch.equal(sampled(SharedSampler, logits, asked())[1], sampled(Sampler, logits, asked())[1])
