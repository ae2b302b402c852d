# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Hybrids on the CPU. vLLM 0.24 lacks copies of states, zeroed pages and prefix caching next to AMX, and both versions
pack a convolution's weight, which a weight sync then writes unpacked.

States, keys and values share one pool of pages.
"""

import ctypes
import os
from typing import Any

import torch

from jetrl_verl.patches.patch import Patch


def batch_memcpy(stock, src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor) -> None:
    if src_ptrs.device.type != "cpu":
        return stock(src_ptrs, dst_ptrs, sizes)
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


COPY_STATES = Patch(
    replaces="vllm.v1.worker.mamba_utils:batch_memcpy",
    sha256={"0.24.0": "bb226b6bf7eddec321468257eb19ce29112af5a4118fc9984380c19798728444"},
    by=batch_memcpy,
    symptom="prefix caching of a hybrid model on the CPU fails with `'function' object is not subscriptable`",
    upstream="vLLM 0.29 copies on the CPU",
    until="vLLM 0.24 is not supported",
    needed=True,
)


def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
    layers = self.compilation_config.static_forward_context
    for group in self.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            pages = layers[name].kv_cache
            if isinstance(pages, torch.Tensor):  # keys and values; a layer with states has several tensors
                pages[torch.tensor(block_ids)] = 0


CLEAN_PAGES = Patch(
    replaces="vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids",
    sha256={"0.24.0": "57d1d66f026cbdf1cf481f55b253c1e4b72af440d98feca33aaf341c462c8009"},
    by=_zero_block_ids,
    symptom="stock attention of a hybrid model on the CPU returns NaN where a page has held a state",
    upstream="vLLM 0.29 zeroes these pages",
    until="vLLM 0.24 is not supported",
    needed=True,
)


def get_num_layers_by_block_type(stock, self: Any, parallel_config: Any, block_type: str = "attention") -> int:
    # Asked by vLLM's CPU platform alone, before it turns off prefix caching and chunked prefill.
    if os.environ.get("VERL_PLATFORM") == "cpu" and block_type == "linear_attention":
        return 0
    return stock(self, parallel_config, block_type)


KEEP_PREFIX_CACHING = Patch(
    replaces="vllm.config.model:ModelConfig.get_num_layers_by_block_type",
    sha256={"0.24.0": "29f74daee147286dc428b25f943c2039b1c4d39a7204091f42946a81b192de32"},
    by=get_num_layers_by_block_type,
    symptom="an engine of a hybrid with prefix caching does not start on a processor with AMX",
    upstream="vLLM 0.29 allows both",
    until="vLLM 0.24 is not supported",
    needed=True,
)


def _unsupported() -> bool:
    return False


def register_cpu_gdn_attention_ops(stock) -> None:
    stock()
    if os.environ.get("VERL_PLATFORM") == "cpu":
        # Other processors' code reads a convolution's weight as it is loaded, and any chunk of a prompt.
        torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = _unsupported


READ_UNPACKED = Patch(
    replaces="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:register_cpu_gdn_attention_ops",
    sha256={
        "0.24.0": "28036e4974737d4c5b9874e480cbb5939d78dab124232bcd16b98b3d9659f10d",
        "0.29.0": "28036e4974737d4c5b9874e480cbb5939d78dab124232bcd16b98b3d9659f10d",
    },
    by=register_cpu_gdn_attention_ops,
    symptom="stock gated delta nets compute with a scrambled convolution on a CPU with AVX-512 BF16",
    upstream="inference never reloads a weight; no issue is known",
    until="vLLM keeps a CPU convolution's weight on request",
    needed=True,
)
PATCHES = (COPY_STATES, CLEAN_PAGES, KEEP_PREFIX_CACHING, READ_UNPACKED)
