# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Time the operations of a gated delta net (Qwen3.5) next to vLLM's and flash-linear-attention's on one NVIDIA GPU.

    python3 -m benchmarks.delta_layer                             # about a minute; a line as soon as it is measured
    python3 -m benchmarks.delta_layer --only decode --model 27b

``decode``: conv, rule and gated norm of one token of each request, each and together, captured in a CUDA graph of so
many layers that states come from memory. Requests are at all places of a chunk; GB/s counts what a step reads and
writes of states. ``forward`` and ``forward + backward``: the same operations of a packed micro-batch of 16,384 tokens.
*vllm*: ``causal_conv1d_update``, the packed recurrent kernel and the gated norm of vLLM's wheel. *fla*:
flash-linear-attention's chunk rule. Microseconds, medians.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F

from jetrl_verl import kernels
from jetrl_verl.reference.delta_net import CHUNK, state_shape

HEADS = {"4b": (16, 32), "27b": (16, 48)}
"""Model -> key and value heads. 9B has those of 4B."""
DECODES = (("4b", 128), ("4b", 32), ("4b", 1), ("27b", 128), ("27b", 32), ("27b", 1))
"""Model and requests of a decode step."""
BATCHES = (("4b", 8, 2048), ("4b", 1, 16384), ("4b", 64, 256), ("27b", 8, 2048))
"""Model, sequences and their length."""
EPS = 1e-6
CACHED = 2**27
"""Bytes of states that exceed the L2 cache: a graph goes through as many layers."""
HEAD_START = 4 * 10**7
"""Cycles that the GPU waits before it is timed, some 20 ms, in which Python launches the steps."""
VLLM_OPS = ("vllm.model_executor.layers.fla.ops", "vllm.third_party.flash_linear_attention.ops")

Step = Callable[[], object]


def imported(*names: str):
    """The first of these modules that is there, or None."""
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            pass
    return None


def show(what: str, model: str, shape: str, who: str, **times: object) -> None:
    cells = (f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in times.items())
    print(f"{what:<18} {model:<4} {shape:<10} {who:<7}", " | ".join(cells), flush=True)


class Layer:
    """Random operands of one layer: ``tokens`` rows of a model's projections, decode states of ``slots`` requests."""

    def __init__(self, model: str, tokens: int, slots: int = 0) -> None:
        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").to(dtype)

        self.keys, self.heads = HEADS[model]
        self.columns = 128 * (2 * self.keys + self.heads)
        merged = normal(tokens, self.columns + 128 * self.heads)  # as vLLM's in_proj_qkvz
        self.x, self.z = merged[:, : self.columns], merged[:, self.columns :].unflatten(1, (self.heads, 128))
        self.taps, self.norm = normal(self.columns, 4) / 2, normal(128)
        self.b, self.a = normal(tokens, 2 * self.heads, dtype=torch.float32).chunk(2, dim=1)
        self.a_log, self.dt_bias = torch.rand(self.heads, device="cuda").mul(16).log(), normal(self.heads)
        self.states = torch.zeros(slots, *state_shape(self.heads), device="cuda")
        self.past = torch.zeros(slots, 3, self.columns, dtype=torch.bfloat16, device="cuda")

    @property
    def gates(self) -> tuple[torch.Tensor, ...]:
        return self.b, self.a, self.a_log, self.dt_bias


# --- clocks -----------------------------------------------------------------------------------------------------------


def microseconds(step: Step, repeats: int, rounds: int = 5) -> float:
    """Median of the times of ``repeats`` calls, per call."""
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / repeats)
    return statistics.median(times)


def captured(steps: list[Step]) -> float:
    """Microseconds per step of a CUDA graph of these."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    graph.replay()
    return microseconds(graph.replay, max(2, 64 // len(steps))) / len(steps)


def eager(step: Step) -> float:
    """Microseconds per call; slow ones are called once more only."""
    step()
    once = microseconds(step, 1, 1)
    return once if once > 2e4 else microseconds(step, 4)


# --- decode -----------------------------------------------------------------------------------------------------------


def places_of(requests: int) -> torch.Tensor:
    """Tokens before each request's, int32."""
    return torch.arange(requests, dtype=torch.int32) + 1000


def bytes_of(who: str, requests: int) -> int:
    """What a value head reads and writes of states in a step."""
    if who == "vllm":
        return requests * 2**17
    row = places_of(requests) % CHUNK
    return int((2**15 + 512 * (row + 1) + 4 * row + 3 * 2**15 * (row == CHUNK - 1)).sum())


def jetrl_decode(layers: list[Layer], requests: int) -> tuple[Callable, Callable, Callable]:
    """Conv, rule and norm of a layer, given what the one before returned."""
    places = (
        torch.randperm(requests, device="cuda").int() + 1,  # slot 0 is vLLM's null page
        places_of(requests).cuda(),
        torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
    )

    def rule(layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(layer.z)
        kernels.gated_delta_rule_update(qkv, *layer.gates, layer.states, *places, out)
        return out

    return (
        lambda layer, _: kernels.causal_conv1d_update(layer.x, layer.taps, layer.past, *places),
        rule,
        lambda layer, o: kernels.gated_rms_norm(o, layer.z, layer.norm, EPS),
    )


def vllm_decode(layers: list[Layer], requests: int) -> tuple[Callable, Callable, Callable] | None:
    """As :func:`jetrl_decode`, by vLLM's kernels."""
    convolution = imported("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    package = next((name for name in VLLM_OPS if imported(f"{name}.fused_recurrent")), None)
    if convolution is None or package is None:
        return None
    packed = import_module(f"{package}.fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
    normed = import_module(f"{package}.layernorm_guard").rmsnorm_fn
    slots = torch.randperm(requests, device="cuda").int() + 1
    for layer in layers:  # in vLLM's types; the convolution overwrites its input
        layer.rounded, layer.overwritten = (layer.a.bfloat16(), layer.b.bfloat16()), layer.x.clone()
        layer.gate, layer.states = layer.z.reshape(-1, 128), layer.states[:, :, :128].contiguous()

    def conv(layer: Layer, _: object) -> torch.Tensor:
        update = convolution.causal_conv1d_update
        return update(layer.overwritten, layer.past.mT, layer.taps, None, "silu", conv_state_indices=slots)

    def rule(layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        out = torch.empty(requests, 1, layer.heads, 128, dtype=torch.bfloat16, device="cuda")
        operands = qkv, *layer.rounded, layer.a_log, layer.dt_bias, 128**-0.5, layer.states, out, slots
        packed(*operands, use_qk_l2norm_in_kernel=True)
        return out

    return conv, rule, lambda layer, o: normed(o.view(-1, 128), layer.norm, None, layer.gate, EPS)


@torch.no_grad()
def decode(who: str, model: str, requests: int) -> None:
    heads = HEADS[model][1]
    layers = [Layer(model, requests, requests + 1) for _ in range(max(2, CACHED // (requests * heads * 2**16) + 1))]
    operations = (jetrl_decode if who == "jetrl" else vllm_decode)(layers, requests)
    if operations is None:
        return
    conv, rule, norm = operations
    qkvs = [conv(layer, None) for layer in layers]
    os = [rule(layer, qkv) for layer, qkv in zip(layers, qkvs, strict=True)]
    whole = [lambda layer=layer: norm(layer, rule(layer, conv(layer, None))) for layer in layers]
    parts = {
        "conv": captured([partial(conv, layer, None) for layer in layers]),
        "rule": captured([partial(rule, *operands) for operands in zip(layers, qkvs, strict=True)]),
        "norm": captured([partial(norm, *operands) for operands in zip(layers, os, strict=True)]),
        "together": captured(whole),
    }
    rate = heads * bytes_of(who, requests) / parts["rule"] / 1e3
    show("decode", model, f"{requests} requests", who, **parts, **{"GB/s of the rule": f"{rate:.0f}"})


# --- training ---------------------------------------------------------------------------------------------------------


def fla_rule(layer: Layer, cu: torch.Tensor) -> Callable | None:
    """flash-linear-attention's rule of q | k | v, b, a, A_log and dt_bias."""
    fla = imported("fla.ops.gated_delta_rule")
    if fla is None:
        return None

    def rule(qkv, b, a, a_log, dt_bias):
        q, k, v = qkv[None].split([128 * layer.keys, 128 * layer.keys, 128 * layer.heads], dim=-1)
        q, k, v = (x.unflatten(-1, (-1, 128)) for x in (q, k, v))
        q, k = (x.repeat_interleave(layer.heads // layer.keys, dim=2) for x in (q, k))
        g = -a_log.exp() * F.softplus(a + dt_bias.float())
        options = {"cu_seqlens": cu, "use_qk_l2norm_in_kernel": True}
        return fla.chunk_gated_delta_rule(q, k, v, g[None], b.sigmoid().bfloat16()[None], **options)[0][0]

    return rule


def training(who: str, model: str, sequences: int, length: int) -> None:
    layer = Layer(model, sequences * length)
    cu = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * length
    x, taps, z, norm = (t.detach().contiguous().requires_grad_() for t in (layer.x, layer.taps, layer.z, layer.norm))
    gates = [t.detach().contiguous().requires_grad_() for t in layer.gates]
    with torch.no_grad():
        qkv = kernels.causal_conv1d(x, taps, cu)
    qkv.requires_grad_()
    o = torch.randn(*layer.z.shape, device="cuda").bfloat16().requires_grad_()
    operations = {
        "conv": (lambda x, taps: kernels.causal_conv1d(x, taps, cu), [x, taps]),
        "rule": (lambda *operands: kernels.gated_delta_rule(*operands, cu), [qkv, *gates]),
        "norm": (lambda *operands: kernels.gated_rms_norm(*operands, EPS), [o, z, norm]),
    }
    if who == "fla":
        rule = fla_rule(layer, cu)
        if rule is None:
            return
        operations = {"rule": (rule, [qkv, *gates])}
    shape = f"{sequences} x {length}"
    with torch.no_grad():
        times = {name: eager(partial(call, *operands)) for name, (call, operands) in operations.items()}
    show("forward", model, shape, who, **times)

    def with_backward(call: Callable, operands: list[torch.Tensor]) -> None:
        y = call(*operands)
        torch.autograd.grad(y, operands, y.detach())  # as good as another tensor, and there already

    times = {name: eager(partial(with_backward, *operation)) for name, operation in operations.items()}
    show("forward + backward", model, shape, who, **times)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("decode", "train"), help="leave out the other one")
    parser.add_argument("--model", choices=HEADS, help="leave out the other one")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("no NVIDIA GPU is visible; run this where there is one", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    decodes = [case for case in DECODES if options.model in (None, case[0]) and options.only != "train"]
    batches = [case for case in BATCHES if options.model in (None, case[0]) and options.only != "decode"]
    for contender, run, cases in (
        ("jetrl", decode, decodes),
        ("jetrl", training, batches),
        ("fla", training, batches),
        ("vllm", decode, decodes),
    ):
        for case in cases:
            try:
                run(contender, *case)
            except Exception as error:  # another project's kernel may refuse this GPU or Triton
                print(f"{run.__name__} of {contender} {case}: {type(error).__name__}: {error}", flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
