# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""vLLM's internals: the only module of the package that imports them. Nothing of ours lives here.

A name is vLLM's own unless versions differ in what it means; then it is ours. Free everywhere are ``vllm.LLM``,
``vllm.SamplingParams``, and the registration of plugins and quantization methods. The wheel's compiled kernels are in
kernels/vllm_kernels.py. An engine's parent process imports this module: what touches a device or changes torch when it
is imported comes from a function. Names and shapes of vLLM 0.24 and 0.29; ``config.support.limits`` says which may run.
"""

from types import ModuleType

import numpy as np
import torch
from vllm.config import CompilationConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention.attention import (
    Attention,
    get_attention_context,
    unified_attention_with_output,
)
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, FusedMoeWeightScaleSupported, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention, Qwen3MoeSparseMoeBlock
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput as SamplerOutputV2
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS, SamplingStates

REACHES = (
    "vllm.v1.kv_cache_layout:KVCacheLayout.LBHNC",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.return_sampling_mask",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.thinking_budget_state",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.trace_replay_state",
    "vllm.v1.worker.gpu.sample.thinking_budget:ThinkingBudgetState.enabled",
    "vllm.v1.worker.gpu.sample.thinking_budget:ThinkingBudgetState.use_thinking_budget",
)
"""What this file uses of vLLM through values; scripts/reach.py watches it."""


def platform_worker() -> type:
    """vLLM's worker class of this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker
    return Worker


def flash_attention() -> ModuleType:
    """The module of vLLM's FlashAttention backend."""
    from vllm.v1.attention.backends import flash_attn

    return flash_attn


def gated_delta_net() -> ModuleType:
    """The module of vLLM's gated delta net; it asks a GPU for its name when it is imported."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    return qwen_gdn_linear_attn


def gated_delta_net_backend() -> ModuleType:
    """The module of its attention backend."""
    from vllm.v1.attention.backends import gdn_attn

    return gdn_attn


def hybrid_decoder() -> ModuleType:
    """The module of vLLM's Qwen3.5, which imports that of the gated delta net."""
    from vllm.model_executor.models import qwen3_5

    return qwen3_5


def flash_pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values ``[blocks, block size, Hkv, D]`` of a BF16 cache of that backend.

    vLLM 0.24: ``[blocks, 2, block size, Hkv, D]``; 0.29: ``[blocks, Hkv, block size, 2 D]``.
    """
    return kv_cache.unbind(1) if kv_cache.dim() == 5 else kv_cache.transpose(1, 2).chunk(2, dim=-1)


def cpu_experts() -> ModuleType:
    """The module whose ``select_experts`` chooses a mixture's experts on a CPU."""
    try:
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe as module  # vLLM 0.24
    except ImportError:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe as module
    return module


def head_by_head_layouts() -> tuple:
    """Layouts of a cache whose pages hold one head after another, for vLLM 0.29, which asks a backend for them."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return (KVCacheLayout.LBHNC,)


def thinking_budgets(sampler: SamplerV2) -> np.ndarray | bool:
    """Boolean ``[max_num_reqs]``: requests whose thinking the second runner's sampler limits; vLLM 0.24's cannot."""
    state = getattr(sampler, "thinking_budget_state", None)
    return state is not None and state.enabled and state.use_thinking_budget


def replays_or_returns_masks(sampler: SamplerV2) -> bool:
    """Whether the second runner's sampler repeats given tokens or returns masks of tokens; vLLM 0.24's cannot."""
    replays = getattr(sampler, "trace_replay_state", None) is not None
    return replays or getattr(sampler, "return_sampling_mask", False)
