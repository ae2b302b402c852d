# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a weight sync by side: ``python3 benchmarks/weight_sync.py --model-shape qwen3-4b --layers 36``.

Both sides of verl's naive weight sync in one process, for BF16 (verl's own stream and extension) and for ``jet_fp8``:
an FSDP2 actor of one rank with FP32 masters, verl's bucketed sender and receiver, vLLM's model and loaders. A pair of
queues replaces ZMQ and CUDA IPC; everything else is the code of a run, including the check of the rollout's live
parameters.

A side's seconds are those in which it does not wait for the other; the two alternate, so they add up to the sync. On a
GPU both end each bucket with a synchronization, as in verl, so a side's seconds include its kernels. With ``--narrow``
layers are as narrow as the formats allow, and only host work is left. Precisions take turns, ``--repetitions`` times.

The quantizer and the probes of the check are listed apart, since a CPU runs other code for them than a GPU. On a CPU
the timed syncs reuse the results of both from the sync before, and a side's seconds are those of its own thread.

Counted once per precision, untimed: tensors on the wire, operators of torch that each side calls, views apart, and the
calls that wait for a GPU (``item``, ``tolist``, ``cpu``, ``bool(tensor)``, ``nonzero``).
"""

import argparse
import asyncio
import cProfile
import json
import os
import pickle
import pstats
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.published_shapes import NARROW
from jetrl_verl import formats
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.metrics.quantization import CodeChanges
from jetrl_verl.models import family
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.rollout.arguments import vllm_arguments
from jetrl_verl.sync import wire
from jetrl_verl.sync.quantize import format_of, quantize_stream
from jetrl_verl.sync.wire import SyncStatistics, packed
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.train import gather

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SHAPES = {
    "qwen3-1.7b": dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16, tie_word_embeddings=True),
    "qwen3-4b": dict(hidden_size=2560, intermediate_size=9728, num_attention_heads=32, tie_word_embeddings=True),
    "qwen3-8b": dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, tie_word_embeddings=False),
}
OPTIONS = {"bf16": None, "jet_fp8": JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="shared")}
WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
VIEWS = ("detach", "alias", "split_with_sizes", "_reshape_alias", "_unsafe_view")
CLOCK = time.perf_counter if DEVICE.type == "cuda" else time.thread_time
"""Of a side: on a CPU that of its own thread, which stands still while other programs run."""
PARTS = ("stream", "quantizer", "probes")
console = Console(width=150)


# --- the two ends -----------------------------------------------------------------------------------------------------


class End:
    """One end of the connection, as verl's sender and receiver use a ZMQ socket; it knows how long it has waited."""

    def __init__(self, incoming: queue.SimpleQueue, outgoing: queue.SimpleQueue) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.waited, self.messages = 0.0, 0

    def send_pyobj(self, message: Any) -> None:
        self.messages += 1
        self._outgoing.put(pickle.dumps(message))

    def send(self, message: bytes) -> None:
        self._outgoing.put(message)

    def recv(self) -> bytes:
        started = time.perf_counter()
        message = self._incoming.get()
        self.waited += time.perf_counter() - started
        return message

    def recv_pyobj(self) -> Any:
        return pickle.loads(self.recv())

    def close(self) -> None:
        pass


class Part(threading.local):
    """Which part of a sync a thread is in.

    On a CPU a timed sync takes the results of quantizer and probes from the sync before, since weights do not change
    here: what is left is the stream.
    """

    name = PARTS[0]

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.replays = False
        self.asked: Counter[str] = Counter()

    def start(self, replays: bool) -> None:
        self.seconds.clear()
        self.asked.clear()
        self.replays = replays

    def of(self, name: str, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        kept: dict[int, Any] = {}

        def inside(*args: Any, **kwargs: Any) -> Any:
            if self.name != PARTS[0]:
                return function(*args, **kwargs)
            call = self.asked[key]
            self.asked[key] += 1
            if self.replays:
                return kept[call]
            self.name, started = name, time.perf_counter()
            try:
                results = function(*args, **kwargs)
            finally:
                self.name = PARTS[0]
                self.seconds[name] += time.perf_counter() - started
            if DEVICE.type == "cpu":
                kept[call] = results
            return results

        return inside


PART = Part()


def separate_parts() -> None:
    """Let the functions of the parts say when they run."""
    from jetrl_verl.rollout import worker
    from jetrl_verl.train import weight_stream

    number_format = formats.get("fp8")
    number_format.quantize_weight = PART.of("quantizer", "weights", number_format.quantize_weight)
    number_format.probe = PART.of("probes", "probe", number_format.probe)
    for module in (worker, weight_stream):
        module.stated_operations = PART.of("probes", module.__name__, module.stated_operations)


class Count(TorchDispatchMode):
    """Operators that a thread calls, views apart, by part of the sync."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, Counter[str]] = {name: Counter() for name in PARTS}
        self.views: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.is_view or name in VIEWS:
            self.views[PART.name] += 1
        else:
            self.operators[PART.name][name] += 1
        return func(*args, **(kwargs or {}))


class CountWaits(TorchFunctionMode):
    """Calls of a thread that wait for a GPU, probes included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in WAITS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


# --- the two sides ----------------------------------------------------------------------------------------------------


class Trainer:
    """An FSDP2 actor of one rank with FP32 masters."""

    def __init__(self, config: Qwen3Config) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        from jetrl_verl.train.shared_operations import share_operations
        from jetrl_verl.train.weight_stream import stated_constants

        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = Qwen3ForCausalLM(config).float()
        share_operations(model)
        self._constants = stated_constants(model)
        mesh = init_device_mesh(DEVICE.type, (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.plans = plan_linears(config)
        self._changes = CodeChanges(self.plans)
        self._gather = gather.Gather(partial(format_of, self.plans), config.tie_word_embeddings)

    def stream(self, options: JetConfig | None, sizes: SyncStatistics) -> Iterator[tuple[str, torch.Tensor]]:
        """What verl's engine sends, or this package's (``get_per_tensor_param`` of both)."""
        from jetrl_verl.train.weight_stream import statement_of, sync_parts

        if options is None:
            weights = self.model.state_dict()
            sizes.stock_bytes += sum(value.numel() * value.itemsize for value in weights.values())
            return (
                (name, value.to(DEVICE, non_blocking=True).full_tensor() if isinstance(value, DTensor) else value)
                for name, value in weights.items()
            )
        weights = self._gather.stream(self.model.state_dict(keep_vars=True), DEVICE, sizes)
        statement = statement_of(options, self.plans, DEVICE, constants=self._constants, tied=self._gather.tied)
        quantized = quantize_stream(weights, self.plans, options.scale_rule)
        return packed(sync_parts(quantized, statement, self._changes), sizes)


def rollout_worker(folder: str, options: JetConfig | None) -> Any:
    """vLLM's model of one rank in a worker that receives weights; verl's own extension for BF16."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from jetrl_verl.rollout.shared_operations import share_operations
    from jetrl_verl.rollout.worker import JetWorker, JetWorkerExtension

    arguments_of_precision = vllm_arguments(Job(options), None) if options is not None else {}
    arguments = EngineArgs(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        load_format="dummy",
        **arguments_of_precision,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "env://", 0, "nccl" if DEVICE.type == "cuda" else "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = get_model(vllm_config=config)
    kinds: tuple[type, ...] = (vLLMColocateWorkerExtension,)
    if options is not None:
        kinds = (JetWorkerExtension, JetWorker)
        if options.operations == "shared":
            share_operations(model, config.model_config.hf_config)
    worker = object.__new__(type("Worker", kinds, {}))
    worker._is_qat_model = worker._is_modelopt_qat = False
    worker.device, worker.local_rank, worker.vllm_config = DEVICE, 0, config
    worker.model_runner = SimpleNamespace(model=model, vllm_config=config)
    return worker


class Sync:
    """One weight sync of a trainer into a worker; what each side took and counted."""

    def __init__(self, trainer: Trainer, worker: Any, options: JetConfig | None, megabytes: int) -> None:
        self._trainer, self._worker, self._options, self._megabytes = trainer, worker, options, megabytes

    def run(self, count: bool = False, profile: Path | None = None, replays: bool = False) -> dict[str, Any]:
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

        there, back = queue.SimpleQueue(), queue.SimpleQueue()
        sender_end, receiver_end = End(back, there), End(there, back)
        buffers = queue.SimpleQueue()
        sizes, results = SyncStatistics(), {}
        pieces = 0

        class Sender(transfer.BucketedWeightSender):
            def _init_socket(self) -> None:
                self.socket = sender_end

            def _init_buffer(self) -> None:
                self.buffer = torch.empty(self.bucket_size, dtype=torch.uint8, device=DEVICE)
                buffers.put(self.buffer)

        class Receiver(transfer.BucketedWeightReceiver):
            def _init_socket(self) -> None:
                self.socket = receiver_end

            def _init_buffer(self) -> None:
                started = time.perf_counter()
                self.buffer = buffers.get()
                self.socket.waited += time.perf_counter() - started

        def counted(stream):
            nonlocal pieces
            for item in stream:
                pieces += 1
                yield item

        def send() -> None:
            sender = Sender("queue", bucket_size_mb=self._megabytes, use_shm=DEVICE.type == "cpu")
            asyncio.run(sender.async_send_weights(counted(self._trainer.stream(self._options, sizes))))

        def receive() -> None:
            self._worker.update_weights_from_ipc(use_shm=DEVICE.type == "cpu")

        def side(name: str, end: End, work: Callable[[], None]) -> None:
            profiler = cProfile.Profile() if profile is not None else None
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                if count:
                    operators, waits = stack.enter_context(Count()), stack.enter_context(CountWaits())
                PART.start(replays)
                started, waited = CLOCK(), end.waited
                try:
                    profiler.runcall(work) if profiler is not None else work()
                except BaseException as error:
                    results["failure"] = error
                    end.send(pickle.dumps(error))
                finally:
                    if DEVICE.type == "cuda":
                        torch.cuda.synchronize()
                    # A waiting thread's own clock stands still.
                    busy = CLOCK() - started - (end.waited - waited if CLOCK is time.perf_counter else 0)
                    results[name] = dict(PART.seconds) | {"stream": busy - sum(PART.seconds.values())}
            if count:
                results[name] = {
                    "operators": {part: dict(counts.most_common()) for part, counts in operators.operators.items()},
                    "views": dict(operators.views),
                    "waits": dict(waits.calls),
                }
            if profiler is not None:
                profiler.dump_stats(profile.with_suffix(f".{name}.prof"))

        kept = transfer.BucketedWeightReceiver
        transfer.BucketedWeightReceiver = Receiver
        try:
            threads = [
                threading.Thread(target=side, args=("sender", sender_end, send)),
                threading.Thread(target=side, args=("receiver", receiver_end, receive)),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            transfer.BucketedWeightReceiver = kept
        if "failure" in results:
            raise results["failure"]
        results["pieces"], results["buckets"] = pieces, sender_end.messages
        results["bytes"] = sizes.bytes if self._options is not None else sizes.stock_bytes
        return results


# --- the report -------------------------------------------------------------------------------------------------------


def elements_of_a_layer(config: Qwen3Config) -> int:
    """Elements of a decoder layer's matrices."""
    shapes = family(config).shapes(config)
    return sum(shape.n * shape.k for shape in shapes.values())


def report(result: dict[str, Any]) -> None:
    layers = result["layers"]
    title = f"{result['model_shape']}, {layers} layers, {result['device']}: milliseconds, median (smallest to largest)"
    table = Table(title=title, box=SIMPLE_HEAD)
    columns = (
        "precision",
        "side",
        "stream",
        "quantizer",
        "probes",
        "us a tensor",
        "operators a layer",
        "views a layer",
    )
    for column in (*columns, "waits", "pieces", "MiB", "buckets"):
        table.add_column(column, justify="right")
    for precision, results in result["precisions"].items():
        counts, runs = results["counts"], results["runs"]
        for side in ("sender", "receiver", "both"):
            sides = ("sender", "receiver") if side == "both" else (side,)
            of_parts = runs if DEVICE.type == "cuda" else [results["parts"]]
            times = {
                part: [1e3 * sum(run[name].get(part, 0) for name in sides) for run in (of_parts if i else runs)]
                for i, part in enumerate(PARTS)
            }
            operators = sum(sum(counts[name]["operators"]["stream"].values()) for name in sides)
            wire = (str(counts["pieces"]), f"{counts['bytes'] / 2**20:.1f}", str(counts["buckets"]))
            table.add_row(
                precision,
                side,
                f"{statistics.median(times['stream']):.1f} ({min(times['stream']):.1f} to {max(times['stream']):.1f})",
                *(f"{statistics.median(times[part]):.1f}" for part in PARTS[1:]),
                f"{1e3 * statistics.median(times['stream']) / result['tensors']:.0f}",
                f"{operators / layers:.1f}",
                f"{sum(counts[name]['views']['stream'] for name in sides) / layers:.1f}",
                str(sum(sum(counts[name]["waits"].values()) for name in sides)),
                *(wire if side == "both" else ("", "", "")),
            )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--narrow", action="store_true", help="layers as thin as the formats allow: host work alone")
    parser.add_argument("--precisions", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=2048, help="of a bucket; verl's default")
    parser.add_argument("--profile", type=Path, help="write FILE.<precision>.<side>.prof of one more sync each")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if DEVICE.type == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from jetrl_verl import cpu_platform

        cpu_platform.install()
        torch.set_num_threads(1)
    shape = dict(num_key_value_heads=8, vocab_size=151936) | SHAPES[options.model_shape]
    config = Qwen3Config(
        **(shape | (NARROW if options.narrow else {})),
        num_hidden_layers=options.layers,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        architectures=["Qwen3ForCausalLM"],
    )
    name = options.model_shape + (", narrow" if options.narrow else "")
    result: dict[str, Any] = {"model_shape": name, "layers": options.layers, "build": provenance()}
    result["device"] = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, one thread"
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        store = f"file://{folder}/store"
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        if options.narrow:
            wire._SMALL = 2**14  # or thin qdata would travel with their scales, as those of no real model do
            # As many layers together, and as many bytes of a stack in a piece, as at the real width.
            thin = elements_of_a_layer(config) / elements_of_a_layer(Qwen3Config(**shape, head_dim=128))
            gather.TOGETHER_BYTES = int(gather.TOGETHER_BYTES * thin)
            wire._STACK_BYTES = int(wire._STACK_BYTES * thin)
        trainer = Trainer(config)
        separate_parts()
        syncs = {
            precision: Sync(trainer, rollout_worker(folder, OPTIONS[precision]), OPTIONS[precision], options.megabytes)
            for precision in options.precisions
        }
        result["precisions"] = {precision: {"runs": []} for precision in syncs}
        for precision, sync in syncs.items():
            sync.run()  # the first one compiles, fills caches and starts clocks
            result["precisions"][precision]["counts"] = sync.run(count=True)
            result["precisions"][precision]["parts"] = sync.run()
        result["tensors"] = len(trainer.model.state_dict())
        for _ in range(options.repetitions):
            for precision, sync in syncs.items():
                result["precisions"][precision]["runs"].append(sync.run(replays=DEVICE.type == "cpu"))
        report(result)
        for precision, sync in syncs.items() if options.profile else ():
            sync.run(profile=options.profile.with_suffix(f".{precision}"))
            for side in ("sender", "receiver"):
                file = options.profile.with_suffix(f".{precision}").with_suffix(f".{side}.prof")
                pstats.Stats(str(file)).sort_stats("tottime").print_stats(25)
        torch.distributed.destroy_process_group()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
