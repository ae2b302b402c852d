# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampler with shared log-probabilities: it draws as always, and reports what the trainer would compute."""

import functools
from typing import Any

import torch
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from jetrl_verl.rollout.log_probs import shared_log_probs


def _altered_rows(metadata: SamplingMetadata, logits: torch.Tensor) -> torch.Tensor | None:
    """Rows ``[N]`` whose tokens are not drawn from the whole softmax, by their requests' own parameters; None: none."""
    altered, listed = [], set(metadata.bad_words_token_ids)
    if metadata.top_p is not None:
        altered.append(metadata.top_p < 1)
    if metadata.top_k is not None:
        altered.append(metadata.top_k < logits.shape[1])
    if not metadata.no_penalties:
        altered += [metadata.frequency_penalties != 0, metadata.presence_penalties != 0]
        altered.append(metadata.repetition_penalties != 1)
    if metadata.allowed_token_ids_mask is not None:
        altered.append(metadata.allowed_token_ids_mask.any(dim=1))
    for processor in metadata.logitsprocs.all:
        if type(processor) is MinPLogitsProcessor:
            if processor.min_p_count:
                altered.append(processor.min_p.flatten() > 0)
        elif type(processor) is LogitBiasLogitsProcessor:
            listed |= processor.biases.keys()
        elif type(processor) is MinTokensLogitsProcessor:
            listed |= processor.min_toks.keys()
        else:  # unknown, so it may do anything to any row
            listed.update(range(len(logits)))
    if listed:
        altered.append(torch.tensor([row in listed for row in range(len(logits))], device=logits.device))
    return functools.reduce(torch.logical_or, altered) if altered else None


class SharedSampler(Sampler):
    """vLLM's sampler; log-probabilities of the tokens it returns come from ``kernels.log_probs`` on the same logits.

    A request that asks for nucleus sampling, penalties or the like (validation does, and so may an agent loop) keeps
    vLLM's, which is of the distribution that its tokens are drawn from.
    """

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any):
        # The stock sampler divides by the temperature in place.
        output = super().forward(logits.clone(), sampling_metadata, *args, **kwargs)
        tensors = output.logprobs_tensors
        if tensors is not None:
            tokens = tensors.logprob_token_ids
            if not tokens.numel():
                raise ValueError("the shared sampler reports sampled and top tokens, not whole rows (logprobs=-1)")
            shared = shared_log_probs(logits, tokens, sampling_metadata.temperature)
            altered = _altered_rows(sampling_metadata, logits)
            if altered is not None:
                shared = torch.where(altered[:, None], tensors.logprobs, shared)
            output.logprobs_tensors = tensors._replace(logprobs=shared)
        return output

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """Whole rows, for prompt log-probabilities."""
        tokens = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
        return shared_log_probs(logits, tokens, None)


def share_sampler(model_runner: Any) -> None:
    """Turn a model runner's sampler into the shared one, in place.

    A rank of a pipeline that draws no tokens has none, and nothing happens.

    Raises:
        ValueError: a sampler of another kind.
    """
    sampler = model_runner.sampler
    if sampler is None:
        return
    if type(sampler) is Sampler:
        sampler.__class__ = SharedSampler
        return
    # Made of Triton kernels, so imported only where vLLM has imported it.
    from jetrl_verl.rollout.sampler_v2 import SharedSamplerV2

    if type(sampler) is not SharedSamplerV2.__base__:
        raise ValueError(
            f"Sampler {type(sampler).__name__} is not supported with shared operations. Set precision=jet_fp8 "
            "jetrl.operations=stock, or precision=bf16."
        )
    sampler.__class__ = SharedSamplerV2
