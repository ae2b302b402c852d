# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The shared operations (jetrl_verl/ops) in vLLM's place: norms, activation, rotary, logits, log-probabilities.

vLLM lets a plugin replace a layer's class; each class below is vLLM's own with another forward, and it is vLLM's own
forward unless the engine being built was asked for shared operations (``operations: shared`` in the quantisation
config). The sampler draws as it always does; what it reports as log-probabilities of the tokens it drew is computed
here, by the function that the trainer calls on its logits.

Where an FP8 linear alone reads what a norm or the activation writes, that operation quantises its result on the way and
hands the linear codes (:class:`jetrl_verl.ops.Quantised`) in the tensor's place: one kernel in front of a GEMM instead
of two, and no BF16 rows. Between the two vLLM's models do nothing with what flows, and the bits are those of quantising
in the linear. Which operations do so is found once, while the model is being built.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from jetrl_verl import ops
from jetrl_verl.rollout import attention
from jetrl_verl.rollout.method import JetFP8LinearMethod, shares_operations

_GREEDY = 1e-5
"""vLLM takes the most likely token below this temperature and divides by nothing."""


_READERS = {
    "input_layernorm": "self_attn.qkv_proj",
    "post_attention_layernorm": "mlp.gate_up_proj",
    "act_fn": "down_proj",
}
"""Operation in a decoder layer or MLP of vLLM's -> the linear that is the only one to read its result."""


class _ReadByLinear:
    """Mixed in front of a class of vLLM's whose result a quantised linear may be the only one to read.

    Attributes:
        reader_rule: scale rule of that linear; None where there is none, and the result is a tensor.
        keeps_rows: whether the BF16 rows go along with the codes. ``jetrl diff`` records them.
    """

    reader_rule: str | None = None
    keeps_rows = False


def _find_reader(parent: torch.nn.Module, name: str, operation: torch.nn.Module | None) -> None:
    """Hook on every module that becomes part of another: vLLM builds a layer's linears before its norms."""
    if name in _READERS and isinstance(operation, _ReadByLinear) and shares_operations():
        method = getattr(parent.get_submodule(_READERS[name]), "quant_method", None)
        if isinstance(method, JetFP8LinearMethod):
            operation.reader_rule = method.config.scale_rule


register_module_module_registration_hook(_find_reader)


def _replaces(stock: type[CustomOp]) -> Callable[[type[CustomOp]], type[CustomOp]]:
    """Register a class in the place of vLLM's ``stock``, in every engine of this process."""

    def register(replacement: type[CustomOp]) -> type[CustomOp]:
        CustomOp.register_oot(name=stock.__name__)(replacement)
        # Registered, it is called "RMSNorm", and custom_ops=["+rms_norm"] would no longer speak about it.
        replacement.name = stock.name
        return replacement

    return register


@_replaces(RMSNorm)
class SharedRMSNorm(_ReadByLinear, RMSNorm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if shares_operations():
            if self.variance_size_override is not None or not self.has_weight:
                raise ValueError(
                    "the shared RMSNorm has a weight and normalises whole rows; use precision=jet_fp8 "
                    "jetrl.operations=stock"
                )
            self._forward_method = self._forward_shared

    def _forward_shared(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        weight, eps, rule = self.weight, self.variance_epsilon, self.reader_rule
        if residual is None:
            return ops.rms_norm(x, weight, eps) if rule is None else ops.rms_norm_quantize_1x128(x, weight, eps, rule)
        if rule is None:
            return ops.add_rms_norm(x, residual, weight, eps)
        rows, total, codes = ops.add_rms_norm_quantize_1x128(
            x, residual, weight, eps, rule, with_normed=self.keeps_rows
        )
        return ops.Quantised(rows, codes), total


@_replaces(SiluAndMul)
class SharedSiluAndMul(_ReadByLinear, SiluAndMul):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if shares_operations():
            self._forward_method = self._forward_shared

    def _forward_shared(self, x: torch.Tensor) -> torch.Tensor | ops.Quantised:
        gate, up = x.chunk(2, dim=-1)
        if self.reader_rule is None:
            return ops.silu_mul(gate, up)
        rows, codes, _ = ops.silu_mul_quantize(
            gate, up, self.reader_rule, with_product=self.keeps_rows, with_columns=False
        )
        return ops.Quantised(rows, codes)


class _SharedRotary:
    """Mixed in front of vLLM's rotary classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._shared = shares_operations()
        super().__init__(*args, **kwargs)
        if self._shared:
            self._forward_method = self._forward_shared

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        if not self._shared:
            return super()._compute_cos_sin_cache()
        if not self.is_neox_style or self.rotary_dim != self.head_size:
            raise ValueError(
                "the shared rotary rotates whole heads in neox style; use precision=jet_fp8 jetrl.operations=stock"
            )
        parameters = get_current_vllm_config().model_config.hf_config.rope_parameters
        table = ops.rotary_table(self.head_size, self.max_position_embeddings, parameters)
        return table.to(torch.get_default_device())

    def _forward_shared(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor):
        heads = (x.unflatten(-1, (-1, self.head_size)) for x in (query, key))
        rotated = ops.rotary(*heads, self.cos_sin_cache, positions.flatten())
        return tuple(x.flatten(1) for x in rotated)


@_replaces(RotaryEmbedding)
class SharedRotaryEmbedding(_SharedRotary, RotaryEmbedding):
    pass


@_replaces(Llama3RotaryEmbedding)
class SharedLlama3RotaryEmbedding(_SharedRotary, Llama3RotaryEmbedding):
    pass


@PluggableLayer.register_oot(name="LogitsProcessor")
class SharedLogitsProcessor(LogitsProcessor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shares_operations()
        if self._shared and (self.soft_cap is not None or self.scale != 1.0):
            raise ValueError(
                "the shared logits are neither scaled nor capped; use precision=jet_fp8 jetrl.operations=stock"
            )

    def _get_logits(self, hidden_states, lm_head, embedding_bias):
        """``[N, V]`` FP32, ``V`` entries of the vocabulary; None on a rank that vLLM does not gather on.

        Under tensor parallelism a rank holds some columns, padding in the last shard included. A column is one dot
        product whoever computes it, so the result has the bits that one rank would give.
        """
        if not self._shared:
            return super()._get_logits(hidden_states, lm_head, embedding_bias)
        logits = self._gather_logits(ops.logits(hidden_states, lm_head.weight))
        return None if logits is None else logits[..., : self.org_vocab_size]


def shared_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Of ``tokens [N, k]`` in rows of ``logits [N, V]``; a greedy row is not divided, as vLLM does it."""
    if temperature is None:
        temperature = logits.new_ones(len(logits))
    temperature = torch.where(temperature < _GREEDY, 1.0, temperature).to(torch.float32)
    return ops.log_probs(logits, tokens.to(torch.int64), temperature)


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
    """vLLM's sampler; log-probabilities of the tokens it returns come from ``ops.log_probs`` on the same logits.

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
    """Turn a model runner's sampler into the shared one, in place; idempotent.

    Raises:
        ValueError: a sampler of another kind.
    """
    sampler = model_runner.sampler
    if isinstance(sampler, Sampler):
        sampler.__class__ = SharedSampler
        return
    from jetrl_verl.rollout.sampler_v2 import SharedSamplerV2

    if not isinstance(sampler, SharedSamplerV2.__base__):
        raise ValueError(
            f"no shared sampler stands in for {type(sampler).__name__}; use precision=jet_fp8 jetrl.operations=stock"
        )
    sampler.__class__ = SharedSamplerV2


attention.register()
