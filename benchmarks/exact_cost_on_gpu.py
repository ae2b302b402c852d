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
"""What the shared operations cost: training step and decode of a Qwen3-8B shape under bf16, jet_fp8 and jet_fp8_exact.

    python benchmarks/exact_cost_on_gpu.py --out benchmarks/results/exact_cost_h200.json

*Training.* Three models share one set of random BF16 weights and run interleaved on packed tokens: the forward that
yields old log-probabilities, then forward and backward with activation checkpointing. bf16 and jet_fp8 take them by
torch's cross entropy on BF16 logits (verl takes flash-attn's kernel, or without it a loop over rows that costs 0.3 s
per 8192 tokens and would flatter the third). No optimiser, no FSDP: both cost every arm the same. Medians of
interleaved repetitions; peak memory of each arm above weights and gradients.

*Decode.* One vLLM engine per precision, each in a process of its own with torch.compile and CUDA graphs and the same
weights in the precision's format, all alive at once and asked in turn: generated tokens per second at several batch
sizes and contexts. Prompts come from the prefix cache; a run of one token is subtracted. One GPU with 140 GB, four
minutes.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetrl_verl import ops
from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.vllm_arguments import vllm_arguments
from jetrl_verl.layers import plan_linears
from jetrl_verl.linear import replace_linears
from jetrl_verl.train.export import quantise_stream
from jetrl_verl.train.shared_operations import share_operations

ARMS = ("bf16", "jet_fp8", "jet_fp8_exact")
DECODE = ((16, 4096), (64, 1024), (256, 256))
"""Batch size and prompt length."""
KV_CACHE = 20 * 2**30
NEW_TOKENS = 256

console = Console(width=140)


def shape(layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=16384,
        rope_theta=1e6,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        eos_token_id=0,
        bos_token_id=None,
    )


def random_weights(config: Qwen3Config) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and BF16 weights on the GPU: normal with a deviation of 0.02, norms one."""
    with torch.device("meta"):
        names = Qwen3ForCausalLM(config).state_dict()
    generator = torch.Generator("cuda").manual_seed(0)
    for name, like in names.items():
        if "norm" in name:
            yield name, torch.ones(like.shape, dtype=torch.bfloat16, device="cuda")
        else:
            values = torch.empty(like.shape, dtype=torch.bfloat16, device="cuda")
            yield name, values.normal_(0, 0.02, generator=generator)


def build_models(config: Qwen3Config) -> dict[str, Qwen3ForCausalLM]:
    """One model per arm, all with the same Parameter objects."""
    weights = {name: torch.nn.Parameter(value) for name, value in random_weights(config)}
    models = {}
    for arm in ARMS:
        with torch.device("meta"):
            model = Qwen3ForCausalLM._from_config(Qwen3Config(**config.to_dict()), attn_implementation="sdpa")
        for name, parameter in weights.items():
            holder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(holder), leaf, parameter)
        # Its buffers were made on the meta device.
        rotary = type(model.model.rotary_emb)(config, device="cuda")
        model.model.rotary_emb = rotary
        if arm != "bf16":
            replace_linears(model, plan_linears(config), scale_rule="fp32")
        if arm == "jet_fp8_exact":
            share_operations(model)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        models[arm] = model
    return models


def log_probs(arm: str, model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """``[B * T]`` log-probability of each next token, at temperature 1."""
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    labels = ids.roll(-1, dims=1).flatten()
    if arm == "jet_fp8_exact":
        return ops.log_probs(logits, labels[:, None], torch.ones_like(labels, dtype=torch.float32)).squeeze(1)
    logits.div_(1.0)  # verl applies the temperature here
    return -F.cross_entropy(logits, labels, reduction="none")


def timed(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def training(config: Qwen3Config, sequences: int, length: int, repetitions: int) -> dict[str, dict]:
    models = build_models(config)
    ids = torch.randint(1, config.vocab_size, (sequences, length), device="cuda")

    def old(arm: str) -> None:
        with torch.no_grad():
            log_probs(arm, models[arm], ids)

    def update(arm: str) -> None:
        log_probs(arm, models[arm], ids).mean().backward()

    for arm in ARMS:
        update(arm)  # compiles, and allocates the gradients
    held = torch.cuda.memory_allocated()
    seconds: dict[str, dict[str, list[float]]] = {arm: {"old_log_prob": [], "update": []} for arm in ARMS}
    peaks = dict.fromkeys(ARMS, 0)
    for _ in range(repetitions):
        for arm in ARMS:
            torch.cuda.reset_peak_memory_stats()
            seconds[arm]["old_log_prob"].append(timed(lambda arm=arm: old(arm)))
            seconds[arm]["update"].append(timed(lambda arm=arm: update(arm)))
            peaks[arm] = torch.cuda.max_memory_allocated() - held
    return {
        arm: {
            **{phase: statistics.median(values) for phase, values in seconds[arm].items()},
            "step": statistics.median(map(sum, zip(*seconds[arm].values(), strict=True))),
            "peak_gib": peaks[arm] / 2**30,
        }
        for arm in ARMS
    }


def serve(arm: str, config: Qwen3Config, connection: Connection, log: Path) -> None:
    """A process with one engine: says how long it took to start, then answers (batch, prompt length, new tokens) with
    the seconds that the generation took, until it is asked None."""
    from vllm import LLM, SamplingParams

    with log.open("w") as lines:
        for stream in (1, 2):
            os.dup2(lines.fileno(), stream)
    arguments = {}
    if arm != "bf16":
        shared = "shared" if arm == "jet_fp8_exact" else "stock"
        arguments = vllm_arguments(JetConfig(arm, train="fp8", rollout="fp8", operations=shared), None)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=8192,
            max_num_seqs=256,
            # Given, not measured: several engines start at once.
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=KV_CACHE,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            compilation_config={"cudagraph_capture_sizes": [1, *(batch for batch, _ in DECODE)]},
            **arguments,
        )
    ready = time.perf_counter() - started
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    weights = random_weights(config)
    runner.model.load_weights(weights if arm == "bf16" else quantise_stream(weights, plan_linears(config), "fp32"))
    if arm == "jet_fp8_exact":
        from jetrl_verl.rollout.shared_operations import share_sampler

        share_sampler(runner)
    connection.send(ready)
    while (asked := connection.recv()) is not None:
        batch, length, new = asked
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(1, config.vocab_size, (batch, length), generator=generator).tolist()
        prompts = [{"prompt_token_ids": row} for row in ids]
        sampling = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        connection.send(timed(partial(llm.generate, prompts, sampling, use_tqdm=False)))


def decode(config: Qwen3Config, logs: Path, repetitions: int) -> dict[str, dict]:
    """Seconds to start and tokens per second of every arm's engine."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    context = multiprocessing.get_context("spawn")
    arms = {}
    for arm in ARMS:
        connection, other = context.Pipe()
        log = logs.with_suffix(f".{arm}.log")
        process = context.Process(target=serve, args=(arm, config, other, log), daemon=True)
        process.start()
        other.close()  # so that its end shows here
        arms[arm] = connection
    found: dict[str, dict] = {}
    for arm in ARMS:
        try:
            found[arm] = {"engine_start_s": arms[arm].recv(), "rates": {}}
        except EOFError:
            console.print(f"the engine of {arm} did not start; see {logs.with_suffix(f'.{arm}.log')}")

    def ask(arm: str, *request: int) -> float:
        arms[arm].send(request)
        return arms[arm].recv()

    for batch, length in DECODE:
        seconds = {arm: [] for arm in found}
        for arm in found:
            ask(arm, batch, length, 8)  # fills the prefix cache, compiles what is left
        for _ in range(repetitions):
            for arm in found:
                prefill = ask(arm, batch, length, 1)
                seconds[arm].append(ask(arm, batch, length, NEW_TOKENS + 1) - prefill)
        for arm, values in seconds.items():
            rate = batch * NEW_TOKENS / statistics.median(values)
            found[arm]["rates"][f"{batch} x {length}"] = {"tokens_per_s": rate, "seconds": values}
    for arm in found:
        arms[arm].send(None)
    return found


def print_report(result: dict) -> None:
    table = Table(title="training step, seconds", box=SIMPLE_HEAD)
    for heading in ("arm", "old log-prob", "update", "step", "to bf16", "to jet_fp8", "peak GiB"):
        table.add_column(heading, justify="right")
    for arm, found in result["training"].items():
        ratios = [found["step"] / result["training"][other]["step"] for other in ARMS[:2]]
        numbers = [found["old_log_prob"], found["update"], found["step"], *ratios]
        table.add_row(arm, *(f"{x:.3f}" for x in numbers), f"{found['peak_gib']:.1f}")
    console.print(table)
    if not result["decode"]:
        return
    table = Table(title="decode, tokens per second (to bf16, to jet_fp8)", box=SIMPLE_HEAD)
    for heading in ("arm", "engine start s", *(f"{batch} x {length}" for batch, length in DECODE)):
        table.add_column(heading, justify="right")
    for arm, found in result["decode"].items():
        cells = []
        for name, rate in found["rates"].items():
            others = [result["decode"].get(other, {}).get("rates", {}).get(name) for other in ARMS[:2]]
            ratios = [f"{rate['tokens_per_s'] / other['tokens_per_s']:.3f}" for other in others if other]
            cells.append(f"{rate['tokens_per_s']:.0f} ({', '.join(ratios)})")
        table.add_row(arm, f"{found['engine_start_s']:.0f}", *cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--no-decode", action="store_true", help="training alone")
    options = parser.parse_args()
    config = shape(options.layers)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"layers": options.layers, "tokens": options.sequences * options.length, "sequences": options.sequences}
    result["decode"] = {} if options.no_decode else decode(config, options.out, options.repetitions)
    for process in multiprocessing.active_children():
        process.join()
    result |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result["training"] = training(config, options.sequences, options.length, options.repetitions)
    print_report(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
