# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a rollout: one decode step, a prefill, and the schedule of many requests in a KV cache of a given size.

Equations: docs/advise.md, "Generation". The schedule is vLLM's in outline: first come, first served; a request enters
while its tokens fit; where the running ones outgrow the cache, the last that entered leaves, and is prefilled again
with what it had generated when it comes back.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from jetrl_verl.formats.catalog import FORMATS, UNQUANTIZED, cache_traits
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.advise.shapes import BF16, Model

WEIGHT_BYTES = {UNQUANTIZED: 2, **dict.fromkeys(FORMATS, 1)}
"""Format of the rollout's linears -> bytes of a weight; qdata have one an element."""

MOST_RANKS = 4
"""Of the replicas whose reductions are on record. In those of more GPUs each reads the products of more others: bytes
take so much longer."""

CHUNKS = 160
"""Steps of a schedule's clock in the longest response; a finer clock changes the seconds by less than 1%."""


@dataclass(frozen=True)
class Step:
    """Seconds of one decode step by what they are spent on; ``weights`` and ``gemm`` are the two limits of the same
    kernels, of which each linear is counted under the longer one."""

    weights: float
    gemm: float
    cache: float
    layers: float
    requests: float
    reductions: float

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))


def _linear(rates: Rates, rows: float, n: float, k: float, kind: str, matrices: float = 1) -> tuple[float, float]:
    """Seconds of one linear of ``rows`` rows, by bytes of its weight and by operations; the shorter one is 0.

    Args:
        matrices: experts that these rows are spread over, each with a weight of its own.
    """
    by_bytes = matrices * n * k * WEIGHT_BYTES[kind] / rates["bandwidth"]
    by_operations = 2 * rows * n * k / rates[f"gemm.{kind}.fprop"]
    return (by_bytes, 0.0) if by_bytes >= by_operations else (0.0, by_operations)


@dataclass(frozen=True)
class Engine:
    """What decodes.

    Attributes:
        linears: format of the linears, of ``WEIGHT_BYTES``.
        shared: whether attention is the shared operation, whose order of a request's keys is fixed: one request of a
            long context then waits for them, a cluster's blocks at a time.
        tp: GPUs of a replica, which add their products behind o and down of each layer; under shared operations in the
            order of the ranks.
        kv_cache: what the cache holds. Under an FP8 one a request waits for its keys, shared operations or not.
    """

    linears: str
    shared: bool = False
    tp: int = 1
    kv_cache: str = UNQUANTIZED


def reduction(rates: Rates, model: Model, engine: Engine, rows: float) -> float:
    """Seconds in which the GPUs of a replica add their products of ``rows`` rows, ``[rows, hidden]`` in BF16."""
    if engine.tp == 1:
        return 0.0
    ranks = min(engine.tp, MOST_RANKS)
    # The sum of two ranks has no order, so nothing else runs there.
    name = f"reduce.{ranks}" + (".ordered" if engine.shared and ranks > 2 else "")
    moved = (engine.tp - 1) / (ranks - 1) * BF16 * rows * model.hidden
    return rates[name] + moved * rates[f"{name}.byte"]


def decode_step(rates: Rates, model: Model, engine: Engine, requests: float, tokens: float) -> Step:
    """One decode step.

    Args:
        requests: running ones. tokens: of the cache that they read, all together.
    """
    kind, tp = engine.linears, engine.tp
    pairs = [
        _linear(rates, requests, n / tp, k, kind if quantized else UNQUANTIZED) for n, k, quantized in model.linears
    ] * model.layers
    if (experts := model.experts) is not None:
        rows, hit = requests * experts.per_token, experts.hit(requests)
        pairs += [
            _linear(rates, rows, n / tp, k, kind if quantized else UNQUANTIZED, hit)
            for n, k, quantized in experts.linears
        ] * model.layers
    pairs.append(_linear(rates, requests, model.vocabulary / tp, model.hidden, UNQUANTIZED))
    held = cache_traits(engine.kv_cache)
    cache = tokens * model.kv_bytes(engine.kv_cache) / tp / rates[f"cache.{held.name}" if held.quantized else "cache"]
    if engine.shared or held.quantized:
        key = rates[f"attention.{held.name}_cache.key" if held.quantized else "attention.shared.key"]
        cache = max(cache, model.layers * tokens / requests * key)
    # What lies between the linears of an FP8 layer depends on whose operations they are; BF16's have one record.
    between = f"decode.{kind}.shared" if engine.shared and kind != UNQUANTIZED else f"decode.{kind}"
    return Step(
        weights=sum(pair[0] for pair in pairs),
        gemm=sum(pair[1] for pair in pairs),
        cache=cache,
        layers=model.layers * rates[f"{between}.layer"],
        requests=requests * rates[f"{between}.request"],
        reductions=_reductions(model) * reduction(rates, model, engine, requests),
    )


def _reductions(model: Model) -> int:
    """Of a step: two a layer, and the rows of an embedding that the ranks share."""
    return 2 * model.layers + 1


def prefill(rates: Rates, model: Model, engine: Engine, tokens: float, context: float) -> float:
    """Seconds of prefilling ``tokens`` tokens that see ``context`` each in the mean."""
    kind = engine.linears
    quantized = model.active_quantized if kind != UNQUANTIZED else 0
    operations = 2 * tokens * (model.active - quantized) / rates["gemm.bf16.fprop"]
    operations += 2 * tokens * quantized / rates[f"gemm.{kind}.fprop"]
    attention = 4 * model.layers * model.queries * tokens * context / rates["attention.shared.forward"]
    seconds = (operations + attention) / engine.tp + tokens * model.layers * rates["prefill.layer"]
    # By its tokens alone: prompts are prefilled together.
    more = reduction(rates, model, engine, tokens) - reduction(rates, model, engine, 0)
    return seconds + _reductions(model) * more


@dataclass
class Schedule:
    """What generating took.

    Attributes:
        seconds: in all. prefill: of them, prompts. preempted: of them, contexts that were computed again.
        spent: seconds of decode steps by what they were spent on, as in ``Step``.
        preemptions: requests that left the cache before they had ended.
        tail: seconds at the end with less than a tenth of the largest number of running requests.
        running: the largest number of requests that ran at once.
    """

    seconds: float = 0.0
    prefill: float = 0.0
    preempted: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    preemptions: int = 0
    tail: float = 0.0
    running: int = 0


def response_lengths(count: int, mean: float, longest: int) -> np.ndarray:
    """``count`` lengths, quantiles of an exponential distribution that is cut at ``longest`` and has mean ``mean``;
    all alike where the mean is the longest. In an order without a pattern, the same every time."""
    if mean >= longest * (1 - 1e-6):
        return np.full(count, float(longest))
    low, high = 1e-3 * mean, 1e3 * longest
    for _ in range(100):
        scale = math.sqrt(low * high)
        low, high = (scale, high) if scale * -math.expm1(-longest / scale) < mean else (low, scale)
    quantiles = (np.arange(count) + 0.5) / count
    lengths = np.minimum(-scale * np.log1p(-quantiles), longest)
    return np.random.default_rng(0).permutation(np.maximum(1.0, lengths))


def generate(
    rates: Rates,
    model: Model,
    engine: Engine,
    lengths: Sequence[float],
    prompt: float,
    *,
    cache_tokens: float = math.inf,
    most: int = 256,
    prefill_share: float = 1.0,
) -> Schedule:
    """Run the requests of one replica.

    Args:
        lengths: of their responses, in the order in which they wait. prompt: tokens of each prompt.
        cache_tokens: tokens that the KV cache holds. most: ``max_num_seqs``.
        prefill_share: of the prompts' tokens that no prefix cache holds already.
    """
    lengths = np.asarray(lengths, dtype=float)
    done = np.zeros(len(lengths))
    tick = max(1.0, lengths.max() / CHUNKS)
    waiting, running = deque(range(len(lengths))), []
    schedule, history = Schedule(), []
    entered = np.zeros(len(lengths), dtype=bool)
    while waiting or running:
        held = sum(prompt + done[i] for i in running)
        while waiting and len(running) < most and (held + prompt + done[waiting[0]] <= cache_tokens or not running):
            i = waiting.popleft()
            running.append(i)
            again = entered[i]
            tokens = prompt + done[i] if again else prompt * prefill_share
            seconds = prefill(rates, model, engine, tokens, (prompt + done[i]) / 2)
            schedule.preempted += seconds if again else 0.0
            schedule.prefill += 0.0 if again else seconds
            schedule.seconds += seconds
            entered[i] = True
            held += prompt + done[i]
        rows = np.array(running)
        steps = np.minimum(lengths[rows] - done[rows], tick)
        while len(running) > 1 and held + steps.sum() > cache_tokens:
            i = running.pop()
            waiting.appendleft(i)
            held -= prompt + done[i]
            schedule.preemptions += 1
            rows, steps = rows[:-1], steps[:-1]
        most_steps = steps.max()
        mean_requests = steps.sum() / most_steps
        tokens = float(((prompt + done[rows] + steps / 2) * steps).sum() / most_steps)
        step = decode_step(rates, model, engine, mean_requests, tokens)
        for part in fields(step):
            spent = most_steps * getattr(step, part.name)
            schedule.spent[part.name] = schedule.spent.get(part.name, 0.0) + spent
        schedule.seconds += most_steps * step.total
        history.append((len(running), most_steps * step.total))
        done[rows] += steps
        running = [i for i in running if lengths[i] - done[i] > 1e-9]
    schedule.running = max(count for count, _ in history)
    for count, seconds in reversed(history):
        if count >= schedule.running / 10:
            break
        schedule.tail += seconds
    return schedule
