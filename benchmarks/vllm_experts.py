# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own mixture of experts, BF16 and block FP8, as a contender of experts_on_gpu.py.

On Hopper vLLM 0.24 runs both on its Triton kernel ``fused_moe_kernel``, with tiles that it has tuned for an H200 and
this shape (``fused_moe/configs``). Where vLLM with its compiled operators can be imported, :func:`blocks` calls what a
Qwen3-MoE block does behind its norm: the gate's BF16 product, ``fused_topk``, ``fused_experts``. Where only its Python
source is there, :func:`products` runs the two launches of that kernel alone, cut out of the file as it stands, on rows
that are sorted and quantized beforehand. That leaves out the gate, the choice, the alignment, the activation, both
quantizations and the sum: it is below what vLLM's block takes.
"""

import ast
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from jetrl_verl import reference
from jetrl_verl.kernels import quantize_1x128
from jetrl_verl.reference import BLOCK, QuantizedTensor

CONFIG = "E={experts},N={inner},device_name=NVIDIA_H200{kind}.json"
BLOCK_FP8 = f",dtype=fp8_w8a8,block_shape=[{BLOCK},{BLOCK}]"


class Layer(NamedTuple):
    """Attributes:
    gate: BF16 ``[E, H]``. bf16: gate and up ``[E, 2 I, H]`` and down ``[E, H, I]``. fp8: their qdata and scales.
    """

    gate: torch.Tensor
    bf16: tuple[torch.Tensor, torch.Tensor]
    fp8: tuple[QuantizedTensor, QuantizedTensor]


Block = Callable[[torch.Tensor], torch.Tensor]


def source_folder(given: Path | None) -> Path | None:
    """vLLM's package ``fused_moe``: ``given``, or that of the installed vLLM, which is not imported for it."""
    if given is not None:
        return given
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "model_executor/layers/fused_moe"


def missing_operators() -> str | None:
    """Why vLLM's whole block cannot run here, or None."""
    try:
        importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    except Exception as error:  # whatever another package raises while it is imported is the reason
        return f"vLLM cannot be imported ({type(error).__name__}: {error})"
    if not hasattr(torch.ops._moe_C, "topk_softmax"):
        return "vLLM is there without its CUDA operators"
    return None


def blocks(layer: Layer, k: int) -> dict[str, Block]:
    """Name -> what vLLM does behind the norm, ``[T, H]`` BF16 to ``[T, H]``."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    gate_up, down = layer.fp8
    in_blocks = fp8_w8a8_moe_quant_config(gate_up.scales, down.scales, block_shape=[BLOCK, BLOCK])

    def block(weights: tuple[torch.Tensor, torch.Tensor], config) -> Block:
        def run(x: torch.Tensor) -> torch.Tensor:
            shares, chosen, _ = fused_topk(x, linear(x, layer.gate), k, True)
            return fused_experts(x, *weights, shares, chosen, quant_config=config)

        return run

    return {"vllm_bf16": block(layer.bf16, None), "vllm_fp8": block((gate_up.qdata, down.qdata), in_blocks)}


class Products:
    """The kernel of ``folder`` and its tuned tiles.

    Raises:
        OSError: no such source or no tiles for this shape.
    """

    def __init__(self, folder: Path, experts: int, inner: int):
        self.tiles = {}
        for name, kind in (("vllm_bf16", ""), ("vllm_fp8", BLOCK_FP8)):
            file = folder / "configs" / CONFIG.format(experts=experts, inner=inner, kind=kind)
            tiles = json.loads(file.read_text())
            self.tiles[name] = {int(m): tile for m, tile in tiles.items() if m.isdigit()}
        self.kernel = _cut_out(folder / "fused_moe.py")

    def calls(self, layer: Layer, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> dict[str, Callable]:
        """Name -> both launches for ``x [T, H]`` whose experts ``[T, k]`` and weights are given."""
        tokens, k = chosen.shape
        hidden, inner = layer.bf16[1].shape[1:]
        rows = torch.randn(tokens * k, inner, device=x.device).bfloat16()
        made = {}
        for name, tiles in self.tiles.items():
            tile = tiles[min(tiles, key=lambda m: abs(m - tokens))]
            where = _aligned(chosen, len(layer.gate), tile["BLOCK_SIZE_M"])
            cache = torch.empty(tokens * k, 2 * inner, dtype=torch.bfloat16, device=x.device)
            out = torch.empty(tokens * k, hidden, dtype=torch.bfloat16, device=x.device)
            fp8 = name == "vllm_fp8"
            weights = layer.fp8 if fp8 else layer.bf16
            inputs = [quantize_1x128(each, "fp32") if fp8 else each for each in (x, rows)]
            made[name] = self._both(inputs, weights, (cache, out), where, shares, tile, k)
        return made

    def _both(self, inputs, weights, outputs, where, shares, tile, k) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            self._launch(inputs[0], weights[0], outputs[0], where, shares, tile, k, weighted=False)
            self._launch(inputs[1], weights[1], outputs[1], where, shares, tile, 1, weighted=True)
            return outputs[1]

        return run

    def _launch(self, a, b, c: torch.Tensor, where, shares: torch.Tensor, tile: dict, k: int, *, weighted: bool):
        fp8 = isinstance(a, QuantizedTensor)
        (a, a_scales), (b, b_scales) = (a, b) if fp8 else ((a, None), (b, None))
        pairs, of_blocks, end = where
        length, n = len(pairs), b.shape[1]
        if len(a) < tile["BLOCK_SIZE_M"]:
            length = min(length, len(a) * k * tile["BLOCK_SIZE_M"])
        grid = (triton.cdiv(length, tile["BLOCK_SIZE_M"]) * triton.cdiv(n, tile["BLOCK_SIZE_N"]),)
        tile = tile | {"BLOCK_SIZE_K": min(tile["BLOCK_SIZE_K"], BLOCK) if fp8 else tile["BLOCK_SIZE_K"]}
        self.kernel[grid](
            *(a, b, c, None, a_scales, b_scales, shares, pairs, of_blocks, end, n, b.shape[2], length, len(a) * k),
            *(*a.stride(), b.stride(0), b.stride(2), b.stride(1), *c.stride()),
            *(a_scales.stride() if fp8 else (0, 0)),
            *((b_scales.stride(0), b_scales.stride(2), b_scales.stride(1)) if fp8 else (0, 0, 0)),
            *(0, 0, *((BLOCK, BLOCK) if fp8 else (0, 0))),
            naive_block_assignment=False,
            MUL_ROUTED_WEIGHT=weighted,
            top_k=k,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=fp8,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            per_channel_quant=False,
            HAS_BIAS=False,
            SPLIT_K=1,
            **tile,
        )


def _aligned(chosen: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pair of each row, one behind the last where there is none; expert of each block of ``rows``; rows in use)."""
    where = reference.segments(chosen, experts, rows)
    pairs = torch.where(where.pair < 0, chosen.numel(), where.pair).to(torch.int32)
    begins = torch.arange(0, len(pairs), rows, device=chosen.device)
    of_blocks = (torch.searchsorted(where.start, begins, right=True) - 1).clamp(max=experts - 1)
    return pairs, of_blocks.to(torch.int32), where.start[-1:].clone()


def _cut_out(file: Path):
    """``fused_moe_kernel`` and what it calls, as functions of a module of their own: the file imports all of vLLM."""
    names = ("write_zeros_to_output", "fused_moe_kernel")
    text = file.read_text()
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    lines = text.splitlines()
    parts = ["import triton", "import triton.language as tl"]
    for name in names:
        parts.append("\n".join(["@triton.jit", *lines[functions[name].lineno - 1 : functions[name].end_lineno]]))
    cut = Path(tempfile.mkdtemp()) / "vllm_fused_moe_kernel.py"
    cut.write_text("\n\n".join(parts) + "\n")
    spec = importlib.util.spec_from_file_location(cut.stem, cut)
    sys.modules[cut.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused_moe_kernel
