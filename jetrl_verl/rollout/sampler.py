# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's samplers, one for each of its model runners, with the trainer's log-probabilities.

If every request of a step samples from the whole softmax, tokens are drawn here, too, in one read of the logits
(kernels/draw.py); other steps (greedy, top_p, penalties, seeds, top log-probabilities) are drawn by vLLM.
"""

import functools
from typing import Any

import numpy as np
import torch

from jetrl_verl import kernels
from jetrl_verl.config.support.table import refuse
from jetrl_verl.rollout import vllm_compat as vllm

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
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor.gpu",
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor.np",
    "vllm.v1.worker.gpu.input_batch:InputBatch",
    "vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sampler",
    "vllm.v1.worker.gpu.sample.bad_words:BadWordsState.num_bad_words",
    "vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState.use_logit_bias",
    "vllm.v1.worker.gpu.sample.logprob:LogprobTokenIdsState.max_num_token_ids",
    "vllm.v1.worker.gpu.sample.output:SamplerOutput",
    "vllm.v1.worker.gpu.sample.penalties:PenaltiesState.use_penalty",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__init__",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.sample",
    "vllm.v1.worker.gpu.sample.states:NO_LOGPROBS",
    "vllm.v1.worker.gpu.sample.states:SamplingStates",
    "vllm.v1.worker.gpu.states:RequestState.prefill_len",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sampler",
)
"""What this file uses of vLLM through values; scripts/reach.py watches it."""

GREEDY = 1e-5
"""Below this temperature vLLM takes the most likely token and does not divide by the temperature."""


def shared_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """FP32 ``[N, k]`` of ``tokens [N, k]`` in rows of ``logits [N, V]``, by the kernel that the trainer calls.

    Greedy rows are not divided by ``temperature``, as in vLLM.
    """
    if temperature is None:
        temperature = logits.new_ones(len(logits))
    temperature = torch.where(temperature < GREEDY, 1.0, temperature).to(torch.float32)
    return kernels.log_probs(logits, tokens.to(torch.int64), temperature)


class _SharedSampling:
    """What both samplers do in a step. A mixin of vLLM's; a subclass reads its runner's form of the requests:

    * ``_is_plain(logits, step)``: whether no request is greedy, has a seed or a thinking budget, or wants more than its
      token's log-probability;
    * ``_altered(logits, step)``: boolean ``[N]``, rows whose requests draw from another distribution; None if no row;
    * ``_temperature(step)``: ``[N]``, None if all requests are greedy;
    * ``_random_bits(logits, step)``: two int64 ``[N]`` from which ``kernels.draw_tokens`` draws;
    * ``_reports(step)``: whether a request wants its token's log-probability;
    * ``_output(ids, reported, step)``: vLLM's output for tokens ``[N, 1]`` of ``token_dtype``.

    Requests with top_p, penalties or the like, as in validation, keep vLLM's log-probabilities, which describe the
    distribution that they draw from.
    """

    token_dtype: torch.dtype

    def _draws(self, logits: torch.Tensor, step: Any) -> bool:
        """Whether :meth:`_drawn` covers a step in which every request draws from ``softmax(logits / temperature)``."""
        return (
            self.logprobs_mode == "processed_logprobs"
            and not self.use_fp64_gumbel
            and logits.dtype == torch.float32
            and self._is_plain(logits, step)
        )

    def draw(
        self, logits: torch.Tensor, temperature: torch.Tensor, step: Any
    ) -> tuple[torch.Tensor, kernels.Normalized]:
        """A token for each row, int64 ``[N]``, and what its log-probability is read from; see ``kernels.draw_tokens``.

        ``jetrl diff`` replaces the tokens by recorded ones.
        """
        return kernels.draw_tokens(logits, temperature, *self._random_bits(logits, step))

    def _drawn(self, logits: torch.Tensor, step: Any) -> Any:
        """vLLM's output for a step, drawn here."""
        temperature, reported = self._temperature(step), None
        tokens, normalized = self.draw(logits, temperature, step)
        ids = tokens.to(self.token_dtype)[:, None]
        if self._reports(step):
            reported = vllm.LogprobsTensors(ids, *kernels.drawn_log_probs(logits, tokens, temperature, normalized))
        return self._output(ids, reported, step)

    def _with_shared_log_probs(self, output: Any, logits: torch.Tensor, step: Any, altered: torch.Tensor | None) -> Any:
        """``output`` of vLLM's sampler, whose log-probabilities of requests with the whole softmax become shared."""
        if (tensors := output.logprobs_tensors) is not None:
            tokens = tensors.logprob_token_ids
            if not tokens.numel():
                raise ValueError("the shared sampler reports sampled and top tokens, not whole rows (logprobs=-1)")
            shared = shared_log_probs(logits, tokens, self._temperature(step))
            if altered is not None:
                shared = torch.where(altered[:, None], tensors.logprobs, shared)
            output.logprobs_tensors = tensors._replace(logprobs=shared)
        return output


# --- the first runner -------------------------------------------------------------------------------------------------


class SharedSampler(_SharedSampling, vllm.Sampler):
    """For vLLM's first model runner."""

    token_dtype = torch.int32

    def forward(self, logits: torch.Tensor, sampling_metadata: vllm.SamplingMetadata, *args: Any, **kwargs: Any):
        altered = self._altered(logits, sampling_metadata)
        if altered is None and not args and not kwargs and self._draws(logits, sampling_metadata):
            return self._drawn(logits, sampling_metadata)
        # The stock sampler divides by the temperature in place.
        output = super().forward(logits.clone(), sampling_metadata, *args, **kwargs)
        return self._with_shared_log_probs(output, logits, sampling_metadata, altered)

    def _is_plain(self, logits: torch.Tensor, step: vllm.SamplingMetadata) -> bool:
        budget = step.thinking_budget_state_holder
        return (
            step.all_random
            and step.max_num_logprobs in (None, 0)
            and not step.logprob_token_ids
            and not step.generators
            and not (budget is not None and budget.has_tracked_requests())
            and len(step.temperature) == len(logits)
        )

    def _altered(self, logits: torch.Tensor, step: vllm.SamplingMetadata) -> torch.Tensor | None:
        altered, listed = [], set(step.bad_words_token_ids)
        if step.top_p is not None:
            altered.append(step.top_p < 1)
        if step.top_k is not None:
            altered.append(step.top_k < logits.shape[1])
        if not step.no_penalties:
            altered += [step.frequency_penalties != 0, step.presence_penalties != 0, step.repetition_penalties != 1]
        if step.allowed_token_ids_mask is not None:
            altered.append(step.allowed_token_ids_mask.any(dim=1))
        for processor in step.logitsprocs.all:
            if type(processor) is vllm.MinPLogitsProcessor:
                if processor.min_p_count:
                    altered.append(processor.min_p.flatten() > 0)
            elif type(processor) is vllm.LogitBiasLogitsProcessor:
                listed |= processor.biases.keys()
            elif type(processor) is vllm.MinTokensLogitsProcessor:
                listed |= processor.min_toks.keys()
            else:  # unknown: it may change any row
                listed.update(range(len(logits)))
        if listed:
            altered.append(torch.tensor([row in listed for row in range(len(logits))], device=logits.device))
        return functools.reduce(torch.logical_or, altered) if altered else None

    def _temperature(self, step: vllm.SamplingMetadata) -> torch.Tensor | None:
        return step.temperature

    def _random_bits(self, logits: torch.Tensor, step: vllm.SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        # From torch's generator of this device: a seeded engine is reproducible, and all ranks draw the same tokens.
        return torch.empty((2, len(logits)), dtype=torch.int64, device=logits.device).random_().unbind()

    def _reports(self, step: vllm.SamplingMetadata) -> bool:
        return step.max_num_logprobs is not None

    def _output(
        self, ids: torch.Tensor, reported: vllm.LogprobsTensors | None, step: vllm.SamplingMetadata
    ) -> vllm.SamplerOutput:
        return vllm.SamplerOutput(sampled_token_ids=ids, logprobs_tensors=reported)

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of whole rows, for prompts."""
        tokens = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
        return shared_log_probs(logits, tokens, None)


# --- the second runner ------------------------------------------------------------------------------------------------


class SharedSamplerV2(_SharedSampling, vllm.SamplerV2):
    """For vLLM's second model runner, which keeps the requests' parameters on the host."""

    token_dtype = torch.int64

    def __call__(self, logits: torch.Tensor, input_batch: vllm.InputBatch):
        altered = self._altered(logits, input_batch)
        if altered is None and self._draws(logits, input_batch):
            return self._drawn(logits, input_batch)
        output = super().__call__(logits, input_batch)  # copies the logits before it changes them
        return self._with_shared_log_probs(output, logits, input_batch, altered)

    def _is_plain(self, logits: torch.Tensor, step: vllm.InputBatch) -> bool:
        rows, states = step.idx_mapping_np, self.sampling_states
        return (
            not self.compute_nans
            and not vllm.replays_or_returns_masks(self)
            and len(rows) == len(logits)
            and states.max_num_logprobs(rows) in (vllm.NO_LOGPROBS, 0)
            and not self.logprob_token_ids_state.max_num_token_ids(rows)
            and bool((states.temperature.np[rows] >= GREEDY).all())
            and not states.any_explicit_seed(rows)
        )

    def _altered(self, logits: torch.Tensor, step: vllm.InputBatch) -> torch.Tensor | None:
        states: vllm.SamplingStates = self.sampling_states
        cut = (states.top_p.np != 1) | (states.top_k.np != states.vocab_size) | (states.min_p.np != 0)
        moved = self.penalties_state.use_penalty | self.logit_bias_state.use_logit_bias
        others = (self.bad_words_state.num_bad_words.np != 0) | vllm.thinking_budgets(self)
        altered: np.ndarray = cut | moved | others
        if not altered[step.idx_mapping_np].any():
            return None
        return torch.from_numpy(altered).to(logits.device)[step.expanded_idx_mapping]

    def _temperature(self, step: vllm.InputBatch) -> torch.Tensor:
        return self.sampling_states.temperature.gpu[step.expanded_idx_mapping]

    def _random_bits(self, logits: torch.Tensor, step: vllm.InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        # As in this runner's own sampler a token depends on its request's seed and position alone.
        positions = step.positions[step.logits_indices]
        return self.sampling_states.seeds.gpu[step.expanded_idx_mapping], positions.to(torch.int64)

    def _reports(self, step: vllm.InputBatch) -> bool:
        return self.sampling_states.max_num_logprobs(step.idx_mapping_np) != vllm.NO_LOGPROBS

    def _output(
        self, ids: torch.Tensor, reported: vllm.LogprobsTensors | None, step: vllm.InputBatch
    ) -> vllm.SamplerOutputV2:
        lengths = step.seq_lens
        num_sampled, num_rejected = vllm.get_num_sampled_and_rejected(
            lengths.new_ones(step.num_reqs),
            lengths,
            step.cu_num_logits,
            step.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return vllm.SamplerOutputV2(ids, reported, None, num_sampled, num_rejected)


_SHARED: dict[type, type] = {vllm.Sampler: SharedSampler, vllm.SamplerV2: SharedSamplerV2}
"""vLLM's class -> its subclass."""


def share_sampler(model_runner: Any) -> None:
    """Make a model runner's sampler the shared one, in place; nothing if it has none.

    Raises:
        UnsupportedConfiguration: a sampler of another class.
    """
    sampler = model_runner.sampler
    if sampler is None:
        return
    if type(sampler) not in _SHARED:
        refuse("operation_replaced_in_vllm", what=f"the sampler {type(sampler).__name__}")
    sampler.__class__ = _SHARED[type(sampler)]
