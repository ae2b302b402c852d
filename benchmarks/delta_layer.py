# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Time the operations of a gated delta net (Qwen3.5) next to vLLM's and flash-linear-attention's on one NVIDIA GPU.

    python3 -m benchmarks.delta_layer
    python3 -m benchmarks.delta_layer --models 4b --what decode --batches 1 32 128 --out delta.json

``decode``: conv, rule and gated norm of one token of each request, captured in a CUDA graph of one layer after the
other, so that states come from memory; ``rule``, ``conv`` and ``norm`` alone. *vllm*: ``causal_conv1d_update``, the
packed recurrent kernel and the gated norm of vLLM's wheel, where it has them, over FP32 states too.
``train``: conv, rule and gated norm of a packed micro-batch, forward, and forward with backward. *fla*:
flash-linear-attention's chunk kernel and gated norm around the same convolution, where it is installed.

GB/s counts a step's states, read and written once. Median of ``--rounds`` runs that take turns.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jetrl_verl import kernels
from jetrl_verl.tools.provenance import provenance

HEADS = {"2b": (16, 16), "4b": (16, 32), "27b": (16, 48)}
"""Model -> key and value heads. 9B has those of 4B."""
BATCHES = (1, 32, 128)
PACKED = {"8 x 2048": (2048,) * 8, "1 x 16384": (16384,), "64 x 256": (256,) * 64}
EPS = 1e-6
CACHED = 2**27
"""Bytes of states that exceed the L2 cache: a graph goes through as many layers."""
VLLM_OPS = ("vllm.model_executor.layers.fla.ops", "vllm.third_party.flash_linear_attention.ops")

Calls = dict[str, dict[str, Callable]]
"""Part -> contender -> call."""


def imported(*names: str):
    """The first of these modules that is there, or None."""
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            pass
    return None


class Layer:
    """Random operands of one layer: ``tokens`` rows of a model's projections."""

    def __init__(self, keys: int, heads: int, tokens: int) -> None:
        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").to(dtype)

        self.keys, self.heads, self.columns = keys, heads, 128 * (2 * keys + heads)
        merged = normal(tokens, self.columns + 128 * heads)  # as vLLM's in_proj_qkvz
        self.x, self.z = merged[:, : self.columns], merged[:, self.columns :].unflatten(1, (heads, 128))
        self.conv, self.norm = normal(self.columns, 4) / 2, normal(128)
        self.b, self.a = normal(tokens, 2 * heads, dtype=torch.float32).chunk(2, dim=1)
        self.a_log, self.dt_bias = torch.rand(heads, device="cuda").mul(16).log(), normal(heads)


@torch.no_grad()
def decode_calls(keys: int, heads: int, requests: int) -> Calls:
    """Of one decode step."""
    layers = [Layer(keys, heads, requests) for _ in range(max(2, CACHED // (requests * heads * 2**16) + 1))]
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    slots = torch.randperm(requests, device="cuda").int() + 1  # slot 0 is vLLM's null page
    computed = torch.full_like(slots, 1000)
    states = [torch.zeros(requests + 1, heads, 128, 128, device="cuda") for _ in layers]
    pasts = [torch.zeros(requests + 1, 3, layer.columns, dtype=torch.bfloat16, device="cuda") for layer in layers]

    def conv(layer: Layer, past: torch.Tensor, _) -> torch.Tensor:
        return kernels.causal_conv1d_update(layer.x, layer.conv, past, slots, computed, cu)

    def rule(layer: Layer, qkv: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        gates = layer.b, layer.a, layer.a_log, layer.dt_bias
        return kernels.gated_delta_rule_update(qkv, *gates, state, slots, computed, cu)

    def norm(layer: Layer, o: torch.Tensor) -> torch.Tensor:
        return kernels.gated_rms_norm(o, layer.z, layer.norm, EPS)

    contenders = {"jetrl": (conv, rule, norm)}
    vllm_conv = imported("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    package = next((name for name in VLLM_OPS if imported(f"{name}.fused_recurrent")), None)
    if package and vllm_conv:
        packed = import_module(f"{package}.fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
        norm_fn = import_module(f"{package}.layernorm_guard").rmsnorm_fn

        def other_conv(layer: Layer, past: torch.Tensor, _) -> torch.Tensor:
            return vllm_conv.causal_conv1d_update(
                layer.overwritten, past.mT, layer.conv, None, "silu", conv_state_indices=slots
            )

        def other_rule(layer: Layer, qkv: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            out = torch.empty(requests, 1, heads, 128, dtype=torch.bfloat16, device="cuda")
            gates = layer.rounded_a, layer.rounded_b, layer.a_log, layer.dt_bias
            packed(qkv, *gates, 128**-0.5, state, out, slots, use_qk_l2norm_in_kernel=True)
            return out

        def other_norm(layer: Layer, o: torch.Tensor) -> torch.Tensor:
            return norm_fn(o.view(-1, 128), layer.norm, None, layer.contiguous_z, EPS)

        contenders["vllm"] = (other_conv, other_rule, other_norm)
        for layer in layers:  # as vLLM has them
            layer.rounded_a, layer.rounded_b = layer.a.bfloat16(), layer.b.bfloat16()
            layer.contiguous_z, layer.overwritten = layer.z.reshape(-1, 128), layer.x.clone()

    calls: Calls = {part: {} for part in ("decode", "conv", "rule", "norm")}
    for name, (conv_, rule_, norm_) in contenders.items():
        qkvs = [conv_(layer, past, None) for layer, past in zip(layers, pasts, strict=True)]
        os = [rule_(*operands) for operands in zip(layers, qkvs, states, strict=True)]
        whole = [partial(lambda layer, past, state, c, r, n: n(layer, r(layer, c(layer, past, None), state)),
                         layer, past, state, conv_, rule_, norm_)
                 for layer, past, state in zip(layers, pasts, states, strict=True)]  # fmt: skip
        calls["decode"][name] = captured(whole)
        calls["conv"][name] = captured([partial(conv_, *operands, None) for operands in zip(layers, pasts)])
        calls["rule"][name] = captured([partial(rule_, *operands) for operands in zip(layers, qkvs, states)])
        calls["norm"][name] = captured([partial(norm_, *operands) for operands in zip(layers, os)])
    return calls


def captured(steps: list[Callable]) -> Callable[[], float]:
    """Microseconds per step of a CUDA graph of these."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    replays = max(3, 40 // len(steps))

    def time() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / replays / len(steps)

    return time


def eager(step: Callable) -> Callable[[], float]:
    """Microseconds per call of ``step``."""
    step()

    def time() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step()
        begin.record()
        for _ in range(3):
            step()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / 3

    return time


def train_calls(keys: int, heads: int, lengths: tuple[int, ...]) -> Calls:
    """Of one micro-batch, forward and with backward."""
    layer = Layer(keys, heads, sum(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    # Autograd's leaves are contiguous, as in_proj_qkv and in_proj_z are two linears in the trainer.
    leaves = [x.detach().contiguous().requires_grad_() for x in
              (layer.x, layer.conv, layer.b, layer.a, layer.a_log, layer.dt_bias, layer.z, layer.norm)]  # fmt: skip

    def conv(x, weight, *_):
        return kernels.causal_conv1d(x, weight, cu)

    qkv = conv(*leaves).detach().requires_grad_()

    def rule(qkv, b, a, a_log, dt_bias, *_):
        return kernels.gated_delta_rule(qkv, b, a, a_log, dt_bias, cu)

    def norm(o, z, weight):
        return kernels.gated_rms_norm(o, z, weight, EPS)

    contenders: dict[str, Callable] = {"jetrl": rule}
    fla = imported("fla.ops.gated_delta_rule")
    if fla:

        def other_rule(qkv, b, a, a_log, dt_bias, *_):
            q, k, v = qkv[None].split([128 * keys, 128 * keys, 128 * heads], dim=-1)
            q, k, v = (x.unflatten(-1, (-1, 128)) for x in (q, k, v))
            q, k = (x.repeat_interleave(heads // keys, dim=2) for x in (q, k))
            g = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
            beta = b.sigmoid().bfloat16()
            options = {"cu_seqlens": cu, "use_qk_l2norm_in_kernel": True}
            return fla.chunk_gated_delta_rule(q, k, v, g[None], beta[None], **options)[0][0]

        contenders["fla"] = other_rule

    o = rule(qkv, *leaves[2:]).detach().requires_grad_()
    do, dy, dqkv = (
        torch.randn_like(o),
        torch.randn(len(o), heads * 128, device="cuda").bfloat16(),
        torch.randn_like(qkv),
    )

    def with_backward(forward: Callable, operands: list, gradient: torch.Tensor) -> None:
        torch.autograd.grad(forward(*operands), [x for x in operands if x.requires_grad], gradient)

    calls: Calls = {}
    for name, call, operands, gradient in (
        ("conv", {"jetrl": conv}, leaves[:2], dqkv),
        ("rule", contenders, [qkv, *leaves[2:6]], do),
        ("norm", {"jetrl": norm}, [o, *leaves[6:]], dy),
    ):
        calls[f"{name} forward"] = {who: eager(torch.no_grad()(partial(f, *operands))) for who, f in call.items()}
        calls[f"{name} forward + backward"] = {
            who: eager(partial(with_backward, f, operands, gradient)) for who, f in call.items()
        }
    return calls


def measure(calls: Calls, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of each part by contender, the median of rounds in which contenders take turns."""
    times = {part: {name: [] for name in contenders} for part, contenders in calls.items()}
    for _ in range(rounds):
        for part, contenders in calls.items():
            for name, time in contenders.items():
                times[part][name].append(time())
    return {part: {name: statistics.median(of) for name, of in names.items()} for part, names in times.items()}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=HEADS, default=["4b", "27b"])
    parser.add_argument("--what", nargs="+", choices=("decode", "train"), default=["decode", "train"])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the record as JSON")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("no NVIDIA GPU is visible; run this where there is one", file=sys.stderr)
        return 1
    table = Table("what", "model", "shape", "part", "jetrl us", "other us", "ratio", "GB/s", box=SIMPLE_HEAD)
    records = []
    torch.manual_seed(0)
    for model in options.models:
        keys, heads = HEADS[model]
        cases = [("decode", f"{n} requests", partial(decode_calls, keys, heads, n), n * heads * 2**17)
                 for n in options.batches]  # fmt: skip
        cases += [("train", name, partial(train_calls, keys, heads, lengths), None) for name, lengths in PACKED.items()]
        for what, shape, make, moved in cases:
            if what not in options.what:
                continue
            for part, times in measure(make(), options.rounds).items():
                jetrl, others = times.pop("jetrl"), list(times.values())
                rate = moved / jetrl / 1e3 if moved and part in ("decode", "rule") else None
                cells = [f"{jetrl:.1f}", *([f"{others[0]:.1f}", f"{jetrl / others[0]:.2f}"] if others else ["", ""])]
                table.add_row(what, model, shape, part, *cells, f"{rate:.0f}" if rate else "")
                records.append({"what": what, "model": model, "shape": shape, "part": part, "jetrl": jetrl, **times})
            torch.cuda.empty_cache()
    Console(width=140).print(table)
    if options.out:
        options.out.write_text(json.dumps({"build": provenance(), "records": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
