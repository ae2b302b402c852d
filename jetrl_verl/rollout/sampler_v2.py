# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The shared log-probabilities for vLLM's second model runner, which some architectures get on a GPU.

A file of its own because that runner's sampler is made of Triton kernels.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.sampler import Sampler

from jetrl_verl.rollout.log_probs import shared_log_probs


class SharedSamplerV2(Sampler):
    """As ``sampler.SharedSampler``, for that runner."""

    def __call__(self, logits: torch.Tensor, input_batch: Any):
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

    def _altered_requests(self) -> np.ndarray:
        """``[max_num_reqs]``, whether a request's tokens are not drawn from the whole softmax."""
        states = self.sampling_states
        cut = (states.top_p.np != 1) | (states.top_k.np != states.vocab_size) | (states.min_p.np != 0)
        moved = self.penalties_state.use_penalty | self.logit_bias_state.use_logit_bias
        return cut | moved | (self.bad_words_state.num_bad_words.np != 0)
