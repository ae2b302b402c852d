# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampler with the trainer's log-probabilities.

If every request of a step samples from the whole softmax, tokens are drawn here, too, in one read of the logits
(kernels/draw.py); other steps (greedy, top_p, penalties, seeds, top log-probabilities) are drawn by vLLM.
"""

import functools
from typing import Any

import torch

from jetrl_verl import kernels
from jetrl_verl.config.support.table import refuse
from jetrl_verl.rollout.log_probs import shared_log_probs
from jetrl_verl.rollout.vllm_compat import (
    LogitBiasLogitsProcessor,
    LogprobsTensors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    Sampler,
    SamplerOutput,
    SamplingMetadata,
)

REACHES = (
    "vllm.v1.outputs:LogprobsTensors",
    "vllm.v1.outputs:SamplerOutput",
    "vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor.biases",
    "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor.min_p",
    "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor.min_p_count",
    "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.min_toks",
    "vllm.v1.sample.metadata:SamplingMetadata",
    "vllm.v1.sample.sampler:Sampler.sample",
    "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.has_tracked_requests",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sampler",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sampler",
)
"""What this file uses of vLLM through values; scripts/reach.py watches it."""

_IDLE = {
    MinPLogitsProcessor: lambda processor: not processor.min_p_count,
    LogitBiasLogitsProcessor: lambda processor: not processor.biases,
    MinTokensLogitsProcessor: lambda processor: not processor.min_toks,
}
"""vLLM's logits processors -> whether one has nothing to do in this step."""


def _from_whole_softmax(metadata: SamplingMetadata) -> bool:
    """Whether every request draws from ``softmax(logits / temperature)``; needs no synchronization with the device."""
    budget = metadata.thinking_budget_state_holder
    return (
        metadata.all_random
        and metadata.top_p is None
        and metadata.top_k is None
        and metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and not (budget is not None and budget.has_tracked_requests())
        and all(_IDLE.get(type(processor), lambda _: False)(processor) for processor in metadata.logitsprocs.all)
    )


def _altered_rows(metadata: SamplingMetadata, logits: torch.Tensor) -> torch.Tensor | None:
    """Boolean ``[N]``: rows whose requests do not draw from the whole softmax; None if all do."""
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
        else:  # unknown: it may change any row
            listed.update(range(len(logits)))
    if listed:
        altered.append(torch.tensor([row in listed for row in range(len(logits))], device=logits.device))
    return functools.reduce(torch.logical_or, altered) if altered else None


class SharedSampler(Sampler):
    """vLLM's sampler, whose log-probabilities come from ``kernels.log_probs``.

    Requests with top_p, penalties or the like, as in validation, keep vLLM's own, which describe the distribution that
    they draw from.
    """

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any):
        if not args and not kwargs and self._draws(logits, sampling_metadata):
            return self._drawn(logits, sampling_metadata)
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

    def _draws(self, logits: torch.Tensor, metadata: SamplingMetadata) -> bool:
        """Whether :meth:`draw` covers a step: no request has a seed or wants more than its token's log-probability."""
        return (
            self.logprobs_mode == "processed_logprobs"
            and not self.use_fp64_gumbel
            and metadata.max_num_logprobs in (None, 0)
            and not metadata.logprob_token_ids
            and not metadata.generators
            and logits.dtype == torch.float32
            and _from_whole_softmax(metadata)
            and len(metadata.temperature) == len(logits)
        )

    def draw(self, logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[torch.Tensor, kernels.Normalized]:
        """Tokens ``[N]``, and the normalizers of their softmax.

        Random bits come from torch's generator of this device, so a seeded engine is reproducible and all ranks draw
        the same tokens.
        """
        bits = torch.empty((2, len(logits)), dtype=torch.int64, device=logits.device).random_()
        return kernels.draw_tokens(logits, metadata.temperature, *bits)

    def _drawn(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        tokens, normalized = self.draw(logits, metadata)
        ids, reported = tokens.to(torch.int32)[:, None], None
        if metadata.max_num_logprobs is not None:
            log_probs_and_ranks = kernels.drawn_log_probs(logits, tokens, metadata.temperature, normalized)
            reported = LogprobsTensors(ids, *log_probs_and_ranks)
        return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=reported)

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of whole rows, for prompts."""
        tokens = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
        return shared_log_probs(logits, tokens, None)


def share_sampler(model_runner: Any) -> None:
    """Make a model runner's sampler the shared one, in place; nothing if it has none.

    Raises:
        UnsupportedConfiguration: a sampler of another class.
    """
    sampler = model_runner.sampler
    if sampler is None:
        return
    if type(sampler) is Sampler:
        sampler.__class__ = SharedSampler
        return
    # Its base is made of Triton kernels; vLLM has imported it by now.
    from jetrl_verl.rollout.sampler_v2 import SharedSamplerV2

    if type(sampler) is not SharedSamplerV2.__base__:
        refuse("sampler_in_vllm", what=f"the sampler {type(sampler).__name__}")
    sampler.__class__ = SharedSamplerV2
