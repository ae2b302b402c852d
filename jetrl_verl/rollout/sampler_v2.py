# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The shared sampler for vLLM's second model runner, whose stock sampler is made of Triton kernels."""

import numpy as np
import torch

from jetrl_verl import kernels
from jetrl_verl.rollout.log_probs import GREEDY, shared_log_probs
from jetrl_verl.rollout.vllm_compat import (
    NO_LOGPROBS,
    InputBatch,
    LogprobsTensors,
    SamplerOutputV2,
    SamplerV2,
    SamplingStates,
    get_num_sampled_and_rejected,
)

REACHES = (
    "vllm.v1.outputs:LogprobsTensors",
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor.gpu",
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor.np",
    "vllm.v1.worker.gpu.input_batch:InputBatch",
    "vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected",
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
)
"""What this file uses of vLLM's second runner through values; scripts/reach.py watches it."""


class SharedSamplerV2(SamplerV2):
    """As ``sampler.SharedSampler``, for the second runner."""

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch):
        if self._draws(logits, input_batch):
            return self._drawn(logits, input_batch)
        output = super().__call__(logits, input_batch)  # copies the logits before it changes them
        tensors = output.logprobs_tensors
        if tensors is not None:
            temperature = self.sampling_states.temperature.gpu[input_batch.expanded_idx_mapping]
            shared = shared_log_probs(logits, tensors.logprob_token_ids, temperature)
            altered = self._altered_requests()
            if altered[input_batch.idx_mapping_np].any():
                rows = torch.from_numpy(altered).to(logits.device)[input_batch.expanded_idx_mapping]
                shared = torch.where(rows[:, None], tensors.logprobs, shared)
            output.logprobs_tensors = tensors._replace(logprobs=shared)
        return output

    def _draws(self, logits: torch.Tensor, input_batch: InputBatch) -> bool:
        """As ``SharedSampler._draws``; this runner keeps the requests' parameters on the host."""
        rows, states = input_batch.idx_mapping_np, self.sampling_states
        return (
            self.logprobs_mode == "processed_logprobs"
            and not self.compute_nans
            and not self.use_fp64_gumbel
            and logits.dtype == torch.float32
            and len(rows) == len(logits)
            and states.max_num_logprobs(rows) in (NO_LOGPROBS, 0)
            and not self.logprob_token_ids_state.max_num_token_ids(rows)
            and bool((states.temperature.np[rows] >= GREEDY).all())
            and not states.any_explicit_seed(rows)
            and not self._altered_requests()[rows].any()
        )

    def draw(
        self, logits: torch.Tensor, input_batch: InputBatch, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, kernels.Normalized]:
        """Tokens ``[N]``, and the normalizers of their softmax; as in this runner's own sampler a token depends on its
        request's seed and position alone."""
        seeds = self.sampling_states.seeds.gpu[input_batch.expanded_idx_mapping]
        positions = input_batch.positions[input_batch.logits_indices]
        return kernels.draw_tokens(logits, temperature, seeds, positions.to(torch.int64))

    def _drawn(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutputV2:
        temperature = self.sampling_states.temperature.gpu[input_batch.expanded_idx_mapping]
        tokens, normalized = self.draw(logits, input_batch, temperature)
        reported = None
        if self.sampling_states.max_num_logprobs(input_batch.idx_mapping_np) != NO_LOGPROBS:
            log_probs_and_ranks = kernels.drawn_log_probs(logits, tokens, temperature, normalized)
            reported = LogprobsTensors(tokens[:, None], *log_probs_and_ranks)
        lengths = input_batch.seq_lens
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            lengths.new_ones(input_batch.num_reqs),
            lengths,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutputV2(tokens[:, None], reported, None, num_sampled, num_rejected)

    def _altered_requests(self) -> np.ndarray:
        """Boolean ``[max_num_reqs]``: requests that do not draw from the whole softmax."""
        states: SamplingStates = self.sampling_states
        cut = (states.top_p.np != 1) | (states.top_k.np != states.vocab_size) | (states.min_p.np != 0)
        moved = self.penalties_state.use_penalty | self.logit_bias_state.use_logit_bias
        return cut | moved | (self.bad_words_state.num_bad_words.np != 0)
