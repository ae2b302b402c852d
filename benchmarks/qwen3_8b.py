# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A Qwen3-8B shape with random weights, or another one's, and vLLM engines that hold it: what the benchmarks of whole
steps share.

Engines live in processes of their own, so that several can be asked in turn within one run, and a cache that is sized
by hand lets them share a GPU. ``jet_fp8`` has shared operations, as it does wherever they cover the job;
``jet_fp8_stock`` is ``jet_fp8`` with ``jetrl.operations=stock``, ``jet_fp8_kv_fp8`` is it with ``jetrl.kv_cache=fp8``.
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from behind_last_layer import kernels_behind
from published_shapes import PUBLISHED
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig

from jetrl_verl import formats, kernels
from jetrl_verl.checkpoint.export import one_by_one
from jetrl_verl.config.options import JetConfig
from jetrl_verl.formats.catalog import UNQUANTIZED, cache_traits
from jetrl_verl.formats.format import SCALE_SUFFIX
from jetrl_verl.models import family
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.rollout.arguments import vllm_arguments
from jetrl_verl.sync.wire import quantize_stream
from jetrl_verl.train.shared_operations import share_operations

OPTIONS = {
    "bf16": None,
    "fp8_rollout": JetConfig("fp8_rollout", train="bf16", rollout="fp8"),
    "int8_rollout": JetConfig("int8_rollout", train="bf16", rollout="int8"),
    "jet_fp8_stock": JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="stock"),
    "jet_fp8": JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="shared"),
    "jet_fp8_kv_fp8": JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="shared", kv_cache="fp8"),
}
"""Options of each precision, None for stock vLLM and Hugging Face."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU is for trying the benchmarks out on a ``--tiny`` shape, not for figures."""

GIB = 2**30


def shape(layers: int = 36, tiny: bool = False) -> Qwen3Config:
    """Qwen3-8B's configuration with ``layers`` of its 36 layers; ``tiny`` for trying a benchmark out."""
    sizes = dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288)
    heads = dict(num_attention_heads=32, num_key_value_heads=8)
    if tiny:
        sizes, heads = dict(vocab_size=512, hidden_size=256, intermediate_size=256), dict.fromkeys(heads, 2)
    return Qwen3Config(
        **sizes,
        **heads,
        num_hidden_layers=layers,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        eos_token_id=0,
        bos_token_id=None,
    )


def mixture_shape(layers: int | None = None, tiny: bool = False) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B's configuration, with ``layers`` of its 48 layers; ``tiny`` for trying a benchmark out."""
    fields = dict(PUBLISHED["qwen3_30b_a3b"].fields)
    if tiny:
        fields |= dict(vocab_size=512, hidden_size=256, intermediate_size=256, num_attention_heads=2)
        fields |= dict(num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    fields |= dict(num_hidden_layers=layers) if layers else {}
    return Qwen3MoeConfig(**fields, architectures=["Qwen3MoeForCausalLM"], eos_token_id=0, bos_token_id=None)


def token_bytes(precision: str, config: PretrainedConfig) -> int:
    """Of keys and values of one token, all layers, in the precision's cache."""
    options = OPTIONS[precision]
    head = cache_traits(UNQUANTIZED if options is None else options.kv_cache).head_bytes(config.head_dim)
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head


def random_weights(config: PretrainedConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and BF16 weights: normal with a deviation of 0.02, norms one."""
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, like in names.items():
        values = torch.ones(like.shape, dtype=torch.bfloat16, device=DEVICE)
        yield name, values if "norm" in name else values.normal_(0, 0.02, generator=generator)


def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load what a trainer sends at a weight sync into vLLM's model, experts as the two tensors that they are."""
    from jetrl_verl.rollout.experts import is_of_experts, load_experts

    def others() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if formats.of(tensor) is None and not name.endswith(SCALE_SUFFIX):
                yield name, tensor
            elif is_of_experts(name, model.config):
                load_experts(model, name, tensor, rank=0)
            else:
                yield name, tensor

    model.load_weights(others())


def build_models(config: Qwen3Config, precisions: tuple[str, ...]) -> dict[str, Qwen3ForCausalLM]:
    """A trainer's model per precision with activation checkpointing, all with the same BF16 Parameter objects."""
    weights = {name: torch.nn.Parameter(value) for name, value in random_weights(config)}
    models = {}
    for precision in precisions:
        with torch.device("meta"):
            model = Qwen3ForCausalLM._from_config(Qwen3Config(**config.to_dict()), attn_implementation="sdpa")
        for name, parameter in weights.items():
            holder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(holder), leaf, parameter)
        # Its buffers were made on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(config, device=DEVICE)
        options = OPTIONS[precision]
        if options is not None and options.train == "fp8":
            replace_linears(model, plan_linears(config), scale_rule=options.scale_rule)
            if options.operations == "shared":
                share_operations(model, options.kv_cache)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        models[precision] = model
    return models


def log_probs(precision: str, model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """``[B * T]`` log-probability of each next token of ``ids [B, T]``, at temperature 1."""
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    labels = ids.roll(-1, dims=1).flatten()
    if OPTIONS[precision] is not None and OPTIONS[precision].operations == "shared":
        return kernels.log_probs(logits, labels[:, None], torch.ones_like(labels, dtype=torch.float32)).squeeze(1)
    logits.div_(1.0)  # verl applies the temperature here
    return -F.cross_entropy(logits, labels, reduction="none")


def drop_qdata(model: Qwen3ForCausalLM) -> None:
    """Make the next pass quantize every weight, as it does behind each of FSDP's gathers."""
    for module in model.modules():
        if isinstance(module, JetLinear):
            module.drop_qdata()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Seconds of ``work`` until the GPU has done it."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


@dataclass(frozen=True)
class EngineSettings:
    """``kv_cache``: bytes of the KV cache. ``captured``: batch sizes that CUDA graphs are captured for."""

    kv_cache: int
    max_model_len: int
    max_num_seqs: int
    captured: list[int] = field(default_factory=list)


def _serve(
    precision: str, config: PretrainedConfig, settings: EngineSettings, connection: Connection, log: Path
) -> None:
    """One engine: imports vLLM and waits to begin, says how long it took to start and to load, then answers each
    :class:`Asked` until it is None."""
    with log.open("w") as lines:
        for stream in (1, 2):
            os.dup2(lines.fileno(), stream)
    if DEVICE == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"  # so that vLLM's CPU build keeps its BF16 weights loadable
    from vllm import LLM, SamplingParams

    connection.recv()
    options = OPTIONS[precision]
    # Given, not measured: several engines start at once.
    memory = dict(gpu_memory_utilization=0.1, kv_cache_memory_bytes=settings.kv_cache)
    on_device = {
        "cuda": memory | {"compilation_config": {"cudagraph_capture_sizes": [1, *settings.captured]}},
        "cpu": {"enforce_eager": True, "gpu_memory_utilization": 0.1},
    }[DEVICE]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            **(on_device if options is None else vllm_arguments(options, on_device)),
        )
    connection.send(time.perf_counter() - started)
    connection.recv()  # one engine at a time holds its weights twice
    core = llm.llm_engine.engine_core.engine_core
    runner, scheduler = core.model_executor.driver_worker.worker.model_runner, core.scheduler
    weights = random_weights(config)
    if options is not None:
        weights = quantize_stream(weights, plan_linears(config), options.scale_rule, options.rollout)
    elif (mixture := family(config).experts) is not None:
        weights = one_by_one(weights, mixture)
    if family(config).experts is None:
        weights = list(weights)  # 61 GB of a mixture's would not fit beside the engine: drawn as they are loaded
    loaded = timed(partial(load, runner.model, weights))
    del weights
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # for the engines and models beside this one
    preempt, preemptions = scheduler._preempt_request, []

    def counted(*args, **kwargs):
        preemptions.append(1)
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    connection.send((loaded, core.vllm_config.cache_config))
    while (asked := connection.recv()) is not None:
        generator = torch.Generator().manual_seed(asked.length)
        ids = torch.randint(1, config.vocab_size, (asked.batch, asked.length), generator=generator).tolist()
        prompts = [{"prompt_token_ids": row} for row in ids]
        sampling = SamplingParams(temperature=1.0, max_tokens=asked.new, ignore_eos=True, logprobs=0, detokenize=False)
        preemptions.clear()
        generate = partial(llm.generate, prompts, sampling, use_tqdm=False)
        if asked.what == "kernels":
            connection.send(kernels_behind(runner, generate, asked.steps))
        elif asked.what == "step":
            connection.send(step_seconds(scheduler, generate, asked.batch))
        else:
            seconds = timed(generate)
            connection.send((seconds, len(preemptions)))


class Asked(NamedTuple):
    """A generation of an engine.

    Attributes:
        batch, length, new: requests, tokens of a prompt and of a response.
        what: ``seconds``, of all of it, and preemptions; ``step``, seconds of a decoding step; or ``kernels``, behind
            the last layer, in ``steps`` of its last steps.
    """

    batch: int
    length: int
    new: int
    what: str = "seconds"
    steps: int = 0


def step_seconds(scheduler: Any, generate: Callable[[], object], batch: int) -> float:
    """Seconds of a decoding step, of those in which each of ``batch`` requests gets one token, from sampled tokens to
    sampled tokens.

    They are told by the scheduler, and not by an engine asked step by step, which would make an output of every request
    in every step: time of the host that a server spends in another process.
    """
    update, ends = scheduler.update_from_output, []

    def timed_update(scheduled: Any, *rest: Any) -> Any:
        if scheduled.total_num_scheduled_tokens == batch == len(scheduled.num_scheduled_tokens):
            ends.append(time.perf_counter())
        return update(scheduled, *rest)

    scheduler.update_from_output = timed_update
    try:
        generate()
    finally:
        del scheduler.update_from_output
    return (ends[-1] - ends[0]) / (len(ends) - 1)


class Engine:
    """An engine in a process of its own, which imports vLLM at once and holds no GPU memory before it begins.

    Attributes:
        start_s: seconds until it answered. load_s: seconds of loading all weights again, in the precision's format;
            of a mixture with drawing and quantizing them. cache_tokens: that the KV cache holds.
    """

    def __init__(self, precision: str, config: PretrainedConfig, settings: EngineSettings, log: Path) -> None:
        self.start_s = self.load_s = float("nan")
        self.cache_tokens = 0
        self._log = log
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(precision, config, settings, other, log), daemon=True)
        self._process.start()
        other.close()  # so that its end shows here

    def begin(self) -> None:
        """Let it build its model."""
        with contextlib.suppress(BrokenPipeError):  # ``wait`` says so
            self._connection.send("begin")

    def wait(self) -> bool:
        """Whether it started, once it has begun; False leaves the reason in its log."""
        try:
            self.start_s = self._connection.recv()
            self._connection.send("load")
            self.load_s, cache = self._connection.recv()
            self.cache_tokens = cache.num_gpu_blocks * cache.block_size
        except (EOFError, BrokenPipeError):
            print(f"an engine did not start; see {self._log}")
            return False
        return True

    def generate(self, batch: int, length: int, new: int) -> tuple[float, int]:
        """Seconds and preemptions of ``batch`` requests with prompts of ``length`` tokens and ``new`` more each."""
        self._connection.send(Asked(batch, length, new))
        return self._connection.recv()

    def decode_seconds(self, batch: int, length: int, new: int) -> float:
        """Seconds of ``new`` decoding steps behind prompts that the prefix cache holds."""
        self._connection.send(Asked(batch, length, new + 1, "step"))
        return new * self._connection.recv()

    def behind_last_layer(self, batch: int, length: int, steps: int) -> dict:
        """What ``kernels_behind`` records of ``steps`` decoding steps behind prompts that the prefix cache holds."""
        self.generate(batch, length, 1)
        # The first steps may still bring prompts.
        self._connection.send(Asked(batch, length, steps + 8, "kernels", steps))
        return self._connection.recv()

    def stop(self) -> None:
        """Let it go and wait until its memory is free."""
        if self._process.is_alive():
            self._connection.send(None)
        self._process.join()


def decode_seconds(
    engines: dict[str, Engine], batch: int, length: int, new: int, repetitions: int
) -> dict[str, list[float]]:
    """Precision -> seconds of ``new`` decoding steps of ``batch`` requests behind ``length`` tokens, in turn."""
    for engine in engines.values():
        engine.generate(batch, length, 8)  # fills the prefix cache, compiles what is left
    seconds: dict[str, list[float]] = {precision: [] for precision in engines}
    for _ in range(repetitions):
        for precision, engine in engines.items():
            seconds[precision].append(engine.decode_seconds(batch, length, new))
    return seconds
