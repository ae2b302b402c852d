# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Host work of a decoder layer of the trainer, forward and backward: ``python3 benchmarks/layer_host_time.py``.

With small micro-batches an update is host-bound: the GPU waits for Python. Layers of Qwen3 as verl trains them, BF16
weights and activation checkpointing, without FSDP. ``--fsdp`` shards each layer by FSDP2 on one rank, from FP32
parameters, and reduces gradients in each micro-batch, as verl does; with ``--fsdp batch`` weights stay gathered from
one micro-batch to the next (``jetrl.gathered=batch``). Precisions take turns:

- *bf16*: stock Hugging Face. *bf16_shared*: the shared operations between its linears. *jet_fp8*: both in FP8.
- */selective* after one of the last two: layers keep results (``jetrl.checkpointing``). */none*: no recomputation.

**Without a GPU** layers are narrow and the batch is small, so that arithmetic takes next to no time. This package's
operations run the code of a Hopper GPU, Triton's Python included, up to the driver's call, which is counted instead of
made. Microseconds are the host's without the driver, some 3 us a launch. Counts are exact.

**On a GPU** layers have the shape of Qwen3-8B, or of ``--shape``: launches of a layer, and milliseconds of the step at
each of ``--tokens``, of the host until all is queued, and of the GPU's kernels; and what a forward keeps for its
backward. ``--where PRECISION`` also prints the functions in which the host spends a step; the profiler slows down each
call.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetrl_verl.kernels import dispatch, native, vllm_kernels
from jetrl_verl.kernels.recomputation import layer_contexts
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.checkpointing import checkpoint
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.train.shared_operations import share_operations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISIONS = ("bf16", "bf16_shared", "jet_fp8")
CHECKPOINTINGS = ("selective", "none")
ROWS = (*PRECISIONS, *(f"{precision}/{kind}" for precision in PRECISIONS[1:] for kind in CHECKPOINTINGS))
PHASES = ("forward", "backward")
SHAPES = {
    "8b": dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8),
    "1.7b": dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8),
}
"""Of Qwen3's layers on a GPU."""
THIN = dict(hidden_size=256, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1)
"""Without one."""
SEQUENCE = 512
"""Tokens of a packed sequence, at most."""
NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "_reshape_alias", "_unsafe_view")
VIEWS_OF_NAME = ("split_with_sizes",)
OURS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
console = Console(width=150)


# --- a GPU's path without a GPU ---------------------------------------------------------------------------------------


class Launches:
    """Counts calls instead of running kernels, and returns memory that nobody wrote."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __getattr__(self, operator: str) -> Callable[..., None]:
        def native_kernel(*_: Any) -> None:
            self.counts["native"] += 1

        return native_kernel

    def attention(self, q, k, v, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.counts["flash attention"] += 1
        return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)

    def attention_backward(self, dout, q, k, v, *_: Any) -> tuple[torch.Tensor, ...]:
        self.counts["flash attention"] += 3  # dO times O, the gradients, dQ to BF16
        dout.to(q.dtype).contiguous()
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Compiled:
    """A compiled Triton kernel, whose launch is counted; hooks are called as Triton's own launcher calls them."""

    name, function, packed_metadata = "", None, None
    launches: Launches

    def launch_metadata(self, grid: Any, stream: int, *_: Any) -> Any:
        from triton.compiler.compiler import LazyDict

        return LazyDict({"name": self.name, "function": self.function, "stream": stream})

    def run(self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
        metadata, enter, leave, *_ = rest
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        Compiled.launches.counts["triton"] += 1


def compiled(kernel: Any, key: str, signature: Any, device: int, *_: Any) -> Compiled:
    """In the place of ``JITFunction._do_compile``."""
    _ = kernel.cache_key  # finds the global names that each launch of a compiled kernel looks at
    compiled = kernel.device_caches[device][0][key] = Compiled()
    return compiled


@contextmanager
def as_on_hopper(launches: Launches) -> Iterator[None]:
    """Our operations as a Hopper GPU runs them, but for their kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    Compiled.launches = launches
    hopper = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    backward = dispatch.Implementation(launches.attention_backward, None)
    with (
        mock.patch.object(JITFunction, "_do_compile", compiled),
        mock.patch.object(driver, "_active", hopper),
        mock.patch.object(dispatch, "platform_of", lambda device: "sm90"),
        mock.patch.object(native, "unavailable", lambda: None),
        mock.patch.object(native, "_operators", launches),
        mock.patch.object(vllm_kernels, "flash_attention_3", launches.attention),
        mock.patch.dict(dispatch._implementations, {("attention_backward", "flash_attention_3"): backward}),
    ):
        yield


class Operators(TorchDispatchMode):
    """Operators that torch runs: kernels of a GPU, views and memory, and this package's (``jetrl``)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "jetrl":
            self.counts["jetrl"] += 1
            self.names[name] += 1
            with self:  # what it asks torch for counts, too
                return func.redispatch(OURS, *args, **(kwargs or {}))
        if func.is_view or name in NO_KERNEL or name in VIEWS_OF_NAME:
            self.counts["views, memory"] += 1
        else:
            self.counts["kernels"] += 1
        self.names[name] += 1
        return func(*args, **(kwargs or {}))


# --- layers -----------------------------------------------------------------------------------------------------------


def join_one_rank() -> None:
    """The process group of one rank that FSDP shards over."""
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)


def shard(model: Qwen3ForCausalLM, gathered: str) -> None:
    """FSDP2 as verl's ``apply_fsdp2`` puts it around the decoder, which is all that a step runs."""
    mesh = init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    for module in (*model.model.layers, model.model.embed_tokens, model.model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=gathered == "pass")
    model.model.set_reshard_after_backward(gathered == "pass")


def make(row: str, config: Qwen3Config, fsdp: str) -> Qwen3ForCausalLM:
    """A model whose layers train as in verl; ``fsdp``: empty for none."""
    precision, _, checkpointing = row.partition("/")
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM(config).to(torch.float32 if fsdp else torch.bfloat16)
    if precision == "jet_fp8":
        replace_linears(model, plan_linears(config), scale_rule="fp32")
    if precision != "bf16":
        share_operations(model)
    elif DEVICE.type == "cuda":
        from jetrl_verl.train.register import register

        register()
        model.config._attn_implementation = "jetrl_varlen"
    if precision == "bf16":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif checkpointing != "none":
        checkpoint(model, partial(layer_contexts, checkpointing == "selective"))
    if fsdp:
        shard(model, fsdp)
    return model.train()


class Step:
    """Forward and backward of a model's decoder layers on one packed micro-batch; heads and losses are left out."""

    def __init__(self, precision: str, config: Qwen3Config, tokens: int, fsdp: str = "") -> None:
        self.model = make(precision, config, fsdp)
        # FSDP drops the qdata of a weight itself, with each gather.
        self._layers = [module for module in self.model.modules() if isinstance(module, JetLinear) and not fsdp]
        positions = torch.arange(tokens, device=DEVICE) % SEQUENCE
        self._inputs = {
            "input_ids": torch.randint(0, config.vocab_size, (1, tokens), device=DEVICE),
            "position_ids": positions[None],
            "use_cache": False,
        }
        self._gradient = torch.randn(1, tokens, config.hidden_size, device=DEVICE).to(torch.bfloat16)
        self._out: torch.Tensor | None = None

    def _drop_qdata(self) -> None:
        """In FSDP's place, where there is none: weights are quantized in forward and in backward."""
        for layer in self._layers:
            layer.drop_qdata()

    def forward(self) -> None:
        self._drop_qdata()
        self._out = self.model.model(**self._inputs).last_hidden_state

    def backward(self) -> None:
        self._drop_qdata()
        self._out.backward(self._gradient)
        self._out = None
        self.model.zero_grad(set_to_none=True)

    def both(self) -> None:
        self.forward()
        self.backward()

    def nodes(self) -> int:
        """Nodes of autograd of the last forward."""
        nodes, waiting = set(), [self._out.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [following for following, _ in node.next_functions]
        return len(nodes)


def layers_of(config: Qwen3Config, count: int) -> Qwen3Config:
    return Qwen3Config(**(config.to_dict() | {"num_hidden_layers": count, "layer_types": None}))


# --- without a GPU ----------------------------------------------------------------------------------------------------


def count_on_cpu(step: Step) -> dict[str, Any]:
    """Operators and launches of each phase."""
    results: dict[str, Any] = {}
    launches = Launches()  # one: an attention's backward is chosen in forward
    for phase in PHASES:
        launches.counts.clear()
        with as_on_hopper(launches), Operators() as operators:
            getattr(step, phase)()
        if phase == "forward":
            nodes = step.nodes()
        results[phase] = {**operators.counts, **launches.counts}
        results[f"{phase} names"] = dict(operators.names.most_common())
    results["forward"]["autograd nodes"] = nodes
    return results


def seconds_on_cpu(step: Step) -> dict[str, float]:
    results = {}
    with as_on_hopper(Launches()):
        for phase in PHASES:
            started = time.thread_time()
            getattr(step, phase)()
            results[phase] = time.thread_time() - started
    return results


def differences(more: dict, fewer: dict, layers: int) -> dict:
    """Of one layer: what ``layers`` more of them add."""
    return {key: (more.get(key, 0) - fewer.get(key, 0)) / layers for key in more}


def on_cpu(config: Qwen3Config, options: argparse.Namespace) -> dict[str, Any]:
    """Per layer, from models of few and of many layers: what is outside the layers falls out."""
    few, many = 1, 1 + options.layers
    steps = {
        precision: [Step(precision, layers_of(config, count), options.tokens[0], options.fsdp) for count in (few, many)]
        for precision in options.precisions
    }
    results: dict[str, Any] = {}
    for precision, pair in steps.items():
        for step in pair:
            seconds_on_cpu(step)
        counted = [count_on_cpu(step) for step in pair]
        counts = {phase: differences(counted[1][phase], counted[0][phase], options.layers) for phase in PHASES}
        names = {phase: differences(*(each[f"{phase} names"] for each in counted[::-1]), options.layers)
                 for phase in PHASES}  # fmt: skip
        results[precision] = {"counts": counts, "names": names, "seconds": {phase: [] for phase in PHASES}}
    for _ in range(options.repetitions):
        for precision, pair in steps.items():
            fewer, more = (seconds_on_cpu(step) for step in pair)
            for phase in PHASES:
                results[precision]["seconds"][phase].append((more[phase] - fewer[phase]) / options.layers)
    return results


def report_cpu(results: dict[str, Any]) -> None:
    kinds = ("kernels", "triton", "native", "flash attention", "jetrl", "views, memory", "autograd nodes")
    table = Table(title="host's work for a layer; us, median (smallest)", box=SIMPLE_HEAD)
    for column in ("precision", "phase", "launches", *kinds, "us"):
        table.add_column(column, justify="right")
    for precision, result in results.items():
        total = Counter()
        medians = []
        for phase in (*PHASES, "both"):
            counts = result["counts"][phase] if phase != "both" else total
            if phase != "both":
                total.update(counts)
                medians.append(statistics.median(result["seconds"][phase]))
            launches = sum(counts.get(kind, 0) for kind in ("kernels", "triton", "native", "flash attention"))
            both = [sum(pair) for pair in zip(*result["seconds"].values())]
            seconds = both if phase == "both" else result["seconds"][phase]
            table.add_row(
                precision,
                phase,
                f"{launches:.1f}",
                *(f"{counts.get(kind, 0):.1f}" for kind in kinds),
                f"{1e6 * statistics.median(seconds):.0f} ({1e6 * min(seconds):.0f})",
            )
    console.print(table)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def kernels_on_gpu(step: Step) -> tuple[int, float]:
    """Launches of a step, and seconds of their kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step.both()
        torch.cuda.synchronize()
    kernels = [event for event in trace.key_averages() if event.device_type.name == "CUDA"]
    return sum(event.count for event in kernels), sum(event.self_device_time_total for event in kernels) / 1e6


def kept_on_gpu(step: Step) -> int:
    """Bytes that a forward leaves for its backward."""
    before = torch.cuda.memory_allocated()
    step.forward()
    kept = torch.cuda.memory_allocated() - before
    step.backward()
    return kept


def seconds_on_gpu(step: Step) -> dict[str, float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    step.both()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    return {"host": queued - started, "step": time.perf_counter() - started}


def where_on_host(run: Callable[[], None], title: str, repetitions: int = 5, shown: int = 40) -> None:
    """Print the functions in which the host spends what it runs. A backward runs in the thread that asks for it, or the
    profiler would not see it."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(repetitions):
            run()
        profiler.disable()
    console.print(f"{title}: {repetitions} times")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(shown)


def on_gpu(config: Qwen3Config, options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {precision: {"tokens": {}} for precision in options.precisions}
    for tokens in options.tokens:
        # Each has a configuration of its own, which its attention is written into.
        configs = {precision: layers_of(config, config.num_hidden_layers) for precision in options.precisions}
        steps = {precision: Step(precision, own, tokens, options.fsdp) for precision, own in configs.items()}
        runs = {precision: [] for precision in steps}
        for step in steps.values():
            for _ in range(3):
                seconds_on_gpu(step)
        for _ in range(options.repetitions):
            for precision, step in steps.items():
                runs[precision].append(seconds_on_gpu(step))
        for precision, step in steps.items():
            launches, kernels = kernels_on_gpu(step)
            results[precision]["launches"] = launches / config.num_hidden_layers
            results[precision]["tokens"][tokens] = {
                "kernels": kernels / config.num_hidden_layers,
                "kept": kept_on_gpu(step) / config.num_hidden_layers,
                **{
                    part: [run[part] / config.num_hidden_layers for run in runs[precision]] for part in ("host", "step")
                },
            }
            if precision == options.where:
                where_on_host(step.both, f"{precision}, {tokens} tokens")
        del steps
        torch.cuda.empty_cache()
    return results


def report_gpu(results: dict[str, Any], options: argparse.Namespace) -> None:
    title = (
        "a layer, forward and backward, ms: step, median and smallest; until the host has queued it; kernels of the "
        "GPU; KB that a token keeps"
    )
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in ("precision", "launches", *(f"{tokens} tokens" for tokens in options.tokens)):
        table.add_column(column, justify="right")
    first = results[options.precisions[0]]["tokens"]
    for precision, result in results.items():
        cells = []
        for tokens, parts in result["tokens"].items():
            step, host = (1e3 * statistics.median(parts[part]) for part in ("step", "host"))
            ratio = step / (1e3 * statistics.median(first[tokens]["step"]))
            least, kernels = 1e3 * min(parts["step"]), 1e3 * parts["kernels"]
            kept = parts["kept"] / tokens / 1e3
            cells.append(f"{step:.2f} ({least:.2f}); {host:.2f}; {kernels:.2f}; {ratio:.2f}x; {kept:.1f}")
        table.add_row(precision, f"{result['launches']:.1f}", *cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_a_gpu = DEVICE.type == "cuda"
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384] if on_a_gpu else [16])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of the layers, on a GPU")
    parser.add_argument(
        "--fsdp",
        nargs="?",
        choices=("pass", "batch"),
        const="pass",
        default="",
        help="shard the layers by FSDP2, on one rank; freed after each layer's pass, or after a batch",
    )
    parser.add_argument("--precisions", nargs="+", choices=ROWS, default=list(PRECISIONS))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument(
        "--triton-us", type=float, default=15.0, help="taken for a launch by Triton's JIT, without a GPU"
    )
    parser.add_argument("--where", choices=ROWS, help="print where the host spends a step of it, on a GPU")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    config = Qwen3Config(
        **(SHAPES[options.shape] if on_a_gpu else THIN),
        vocab_size=1024,
        head_dim=128,
        num_hidden_layers=options.layers,
        max_position_embeddings=40960,
        rope_theta=1e6,
        architectures=["Qwen3ForCausalLM"],
    )
    result = {"layers": options.layers, "fsdp": options.fsdp, "build": provenance()}
    if options.fsdp:
        join_one_rank()
    if on_a_gpu:
        result |= {
            "device": torch.cuda.get_device_name(),
            "shape": options.shape,
            "precisions": on_gpu(config, options),
        }
        report_gpu(result["precisions"], options)
    else:
        torch.set_num_threads(1)
        result |= {"device": "CPU, one thread", "precisions": on_cpu(config, options)}
        report_cpu(result["precisions"])
    if options.fsdp:
        torch.distributed.destroy_process_group()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
