# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What an update and its log-probabilities take over the size of a micro-batch, in verl's own engine without a rollout.

    python3 -m benchmarks.micro_batches OUT                                  # 1.7B, all rows, on one GPU
    python3 -m benchmarks.micro_batches OUT --model qwen3_8b --layers 8 --tokens 2048
    python3 -m benchmarks.micro_batches OUT --rows bf16,jet_fp8 --where jet_fp8
    python3 -m benchmarks.micro_batches OUT --tiny                           # two narrow layers on a CPU, to try it

With small micro-batches a GPU waits for its host, and what the host does is more than the layers (layer_host_time.py):
FSDP2's gathers, packing, the loss. Each row has a process with the engine that verl builds from its command line, FSDP2
on one rank with FP32 masters and moments, nothing offloaded; ``--sequences`` packed sequences of ``--length`` tokens,
as many at a time as ``--tokens`` hold. The loss is the mean log-likelihood, a few small operators less than PPO's. The
rows take turns, so what disturbs the host disturbs all of them, and each warms up once at each size.

Seconds: an update (gradients and one step of AdamW), and the log-probabilities alone with their entropy, as verl has
them, each until the GPU has ended; medians, the smallest in brackets, and the median as a multiple of the first row's.
All rows' engines are on the GPU at once, 16 bytes a parameter each. OUT gets ``micro_batches.json`` after each size,
with what the plugin changed in each row's engine. ``--where ROW`` prints where the host spends an update of the first
size, by Python's profiler.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import verl_step
from benchmarks.published_shapes import PUBLISHED, write_model_apart
from benchmarks.recipes import FP32_MOMENTS, NO_OFFLOAD
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.tools.rows import Row, parse_row, split_rows

ROWS = "bf16,bf16_shared,jet_fp8"
PHASES = ("update", "log_probs")
TOKENS = {False: (2048, 4096, 16384), True: (64, 128)}
LENGTH = {False: 1000, True: 32}
"""Whether it is the tiny benchmark -> tokens of a micro-batch, and of a sequence, where the call names none."""

ON_THE_GPU = (*NO_OFFLOAD, *FP32_MOMENTS)
"""verl_step.py makes room for a rollout that is not here."""

console = Console(width=140)


# --- a row's process --------------------------------------------------------------------------------------------------


def build_engine(row: Row, options: argparse.Namespace, model: Path) -> Any:
    """verl's engine of the actor, as its worker builds it from a job's command line."""
    import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry

    job = argparse.Namespace(
        model=options.model, response=options.length, sequences=options.sequences, steps=1, memory=0.5,
        tiny=options.tiny, gpus=1, tp=1, set=[],
    )  # fmt: skip
    paths = RunPaths(options.out / row.slug)
    words = [*verl_step.words_of(Row(row.name), job, model, verl_step.data_of(options.out), paths), *ON_THE_GPU]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*words, *row.settings]).actor_rollout_ref
    actor, of_model = omega_conf_to_dataclass(config.actor), omega_conf_to_dataclass(config.model)
    of_engine = actor.engine
    of_engine.use_remove_padding, of_engine.use_fused_kernels = of_model.use_remove_padding, of_model.use_fused_kernels
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=of_engine.strategy,
        model_config=of_model,
        engine_config=of_engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    engine.initialize()
    return engine


def batch_of(sequences: int, length: int, words: int, tokens: int) -> Any:
    """Random sequences as verl packs them, in micro-batches of at most so many ``tokens``."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    drawn = torch.randint(0, words, (sequences, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(sequences, length, dtype=torch.int64)
    mask[:, 0] = 0  # the first token has no predecessor
    positions = torch.arange(length).expand(sequences, -1)
    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    data = TensorDict(
        {
            "input_ids": jagged(list(drawn)),
            "position_ids": jagged(list(positions)),
            "loss_mask": jagged(list(mask)),
        },
        batch_size=sequences,
    )
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": tokens, "use_remove_padding": True}
    tensordict_utils.assign_non_tensor(data, temperature=1.0, **settings)
    return data


def update(engine: Any, data: Any) -> None:
    from verl.workers.utils.losses import sft_loss

    engine.train_batch(data, partial(sft_loss, None))


def log_probs(engine: Any, data: Any) -> None:
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    engine.infer_batch(data)


def timed(engine: Any, run: Callable[[Any, Any], None], data: Any) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    began = time.perf_counter()
    run(engine, data)
    wait()
    return time.perf_counter() - began


def facts_of(engine: Any) -> dict[str, Any]:
    """What tells an engine of the plugin from verl's."""
    from jetrl_verl.nn.linear import JetLinear

    kind = type(engine)
    quantized = sum(isinstance(module, JetLinear) for module in engine.module.modules())
    return {"engine": f"{kind.__module__}.{kind.__qualname__}", "quantized_linears": quantized}


def serve(row: Row, options: argparse.Namespace, model: Path, parent: Connection) -> None:
    """One row's process: says what its engine is, answers ``(phase, tokens)`` with seconds until it is told nothing
    more, then with its peak memory in GiB."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if options.tiny:
        os.environ["VERL_PLATFORM"] = "cpu"
    backend = "cpu:gloo" if options.tiny else "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not options.tiny:
        from verl.utils.distributed import set_numa_affinity

        set_numa_affinity()
    engine = build_engine(row, options, model)
    words = engine.module.config.vocab_size
    parent.send(facts_of(engine))
    while (asked := parent.recv()) is not None:
        phase, tokens = asked
        data = batch_of(options.sequences, options.length, words, tokens)
        with engine.eval_mode() if phase == "log_probs" else engine.train_mode():
            if phase == "where":
                # Not before verl, which brings the plugin's own modules in when it is ready for them.
                from benchmarks.layer_host_time import where_on_host

                answer = where_on_host(partial(update, engine, data), f"{row}, {tokens} tokens", repetitions=1)
            else:
                answer = timed(engine, {"update": update, "log_probs": log_probs}[phase], data)
        parent.send(answer)
    parent.send(None if options.tiny else torch.cuda.max_memory_allocated() / 2**30)
    torch.distributed.destroy_process_group()


# --- all rows ---------------------------------------------------------------------------------------------------------


class Programs:
    """The rows' processes, on entering each with its engine built; use as a context manager."""

    def __init__(self, rows: Sequence[Row], options: argparse.Namespace, model: Path) -> None:
        self._rows, self._options, self._model = rows, options, model
        self._lines: dict[str, Connection] = {}
        self._programs: list[BaseProcess] = []
        self.facts: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "Programs":
        spawned = multiprocessing.get_context("spawn")
        try:
            for row in self._rows:
                self._lines[str(row)], theirs = spawned.Pipe()
                words = (row, self._options, self._model, theirs)
                self._programs.append(spawned.Process(target=serve, args=words, daemon=True))
                self._programs[-1].start()
                theirs.close()  # a process that dies then ends what we wait for
                self.facts[str(row)] = self._answer(str(row), "built its engine")
        except BaseException:
            self.__exit__()
            raise
        return self

    def ask(self, row: str, phase: str, tokens: int) -> float:
        """Seconds of a row's ``phase`` with so many ``tokens`` a micro-batch.

        Raises:
            ToolError: the process has died.
        """
        self._lines[row].send((phase, tokens))
        return self._answer(row, f"answered for {phase} with {tokens} tokens a micro-batch")

    def peak_gib(self, row: str) -> float | None:
        """Of its memory on the GPU; None on a CPU. The row has ended then."""
        self._lines[row].send(None)
        return self._answer(row, "said its peak memory")

    def _answer(self, row: str, what: str) -> Any:
        try:
            return self._lines[row].recv()
        except EOFError:
            raise ToolError(f"The process of {row} ended before it had {what}; its error stands above.") from None

    def __exit__(self, *_: object) -> None:
        for line in self._lines.values():
            line.close()
        for program in self._programs:
            program.join(20)
            program.kill()


def measure(programs: Programs, options: argparse.Namespace, keep: Callable[[dict], None]) -> dict[str, dict]:
    """Row -> its engine's facts, ``tokens`` of a micro-batch -> phase -> seconds of each repetition, ``peak_gib``."""
    found = {name: {**facts, "tokens": {}} for name, facts in programs.facts.items()}
    for tokens in options.tokens:
        for name in found:
            for phase in PHASES:
                programs.ask(name, phase, tokens)
            found[name]["tokens"][tokens] = {phase: [] for phase in PHASES}
        for _ in range(options.repetitions):
            for name in found:
                for phase in PHASES:
                    found[name]["tokens"][tokens][phase].append(programs.ask(name, phase, tokens))
        keep(found)
    if options.where:
        programs.ask(options.where, "where", options.tokens[0])
    for name in found:
        found[name]["peak_gib"] = programs.peak_gib(name)
    keep(found)
    return found


def report(found: dict[str, dict], options: argparse.Namespace) -> None:
    first = next(iter(found))
    for phase in PHASES:
        title = f"{phase}, {options.sequences} x {options.length} tokens, by tokens of a micro-batch; s"
        table = Table(title=title, box=SIMPLE_HEAD)
        for column in ("row", *(f"{tokens}" for tokens in options.tokens)):
            table.add_column(column, justify="right")
        for name, row in found.items():
            cells = []
            for tokens in options.tokens:
                seconds, against = row["tokens"][tokens][phase], found[first]["tokens"][tokens][phase]
                middle = statistics.median(seconds)
                ratio = middle / statistics.median(against)
                cells.append(f"{middle:.3f} ({min(seconds):.3f}), {ratio:.2f}x")
            table.add_row(name, *cells)
        console.print(table)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the model, and of micro_batches.json")
    parser.add_argument("--model", choices=PUBLISHED, default="qwen3_1_7b", help="published shape")
    parser.add_argument("--layers", type=int, help="of the decoder, the published number if not set")
    parser.add_argument(
        "--rows", default=ROWS, help="of verl_step.py, ROW or ROW+key=value, the first one compared with"
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="of a micro-batch at most")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--where", metavar="ROW", help="print where the host spends an update of it")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU, to try this out")
    options = parser.parse_args(words)
    try:
        rows = [parse_row(text, verl_step.ROWS, "a row") for text in split_rows(options.rows)]
    except ToolError as error:
        parser.error(str(error))
    if options.where and options.where not in (str(row) for row in rows):
        parser.error(f"--where {options.where} is not one of the rows. Set one of --rows {options.rows}.")
    options.tokens, options.length = options.tokens or TOKENS[options.tiny], options.length or LENGTH[options.tiny]
    if min(options.tokens) < options.length:
        fits = f"Set --tokens {options.length} or more."
        parser.error(f"--tokens {min(options.tokens)} is not supported with --length {options.length}. {fits}")
    for row in rows:
        if reason := verl_step.lacking(row.name, options.tiny, options.model):
            parser.error(f"{row} is {reason}")
    options.out = options.out.resolve()
    parts = (options.model, f"{options.layers}_layers" if options.layers else "", "tiny" if options.tiny else "")
    model = options.out / "models" / "-".join(filter(None, parts))
    write_model_apart(options.model, model, options.tiny, options.layers)
    # As Ray has them in a worker that claims one core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    settings = {name: getattr(options, name) for name in ("model", "layers", "sequences", "length", "tiny")}
    device = "CPU" if options.tiny else torch.cuda.get_device_name()
    build = provenance()

    def keep(found: dict) -> None:
        record = {**settings, "device": device, "rows": found, "build": build}
        (options.out / "micro_batches.json").write_text(json.dumps(record, indent=1) + "\n")

    try:
        with Programs(rows, options, model) as programs:
            report(measure(programs, options, keep), options)
    except ToolError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
