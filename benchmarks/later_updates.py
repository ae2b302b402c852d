# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rounding noise in the ratios of a step's later updates, and what removes it, on a CPU.

    python3 -m benchmarks.later_updates policy           # the demo's model, warmed up on sums of 2 to 4 digits
    python3 -m benchmarks.later_updates noise --lr 2e-4  # log-ratios of the same tokens under several products
    python3 -m benchmarks.later_updates noise --lr 1e-6 --start wide   # Qwen3-0.6B's width, 4 layers, random weights
    python3 -m benchmarks.later_updates train            # reward over steps with four updates a step
    python3 -m benchmarks.later_updates table            # both as Markdown

A step samples ``PROMPTS`` x ``GROUP`` responses from the FP8 policy and takes four updates with verl's loss and AdamW.
Master weights are FP32; the trained model is their BF16 cast with FP8 linear layers and shared operations, as in the
engine. Each call stops after ``--seconds``; the same call again continues. ``noise`` compares log pi_theta - log pi_old
of the same two master weights, for the tokens of updates two to four. Products:

- ``fp32``: stock modules on the FP32 master weights, the truth
- ``fp8``: ``jet_fp8``. ``pow2``: with ``jetrl.scale_rule=pow2``. ``kept``: weights keep their blocks' scales of pi_old
- ``bf16``: ``bf16_shared``. ``bf16_stock``: ``bf16``. ``fp8_weights``: ``bf16`` on dequantized FP8 weights

``train`` compares methods. ``bf16`` has BF16 products on both sides, all others FP8 products in sampler and trainer:

- ``fixed``: clip 0.2. ``calibrated``: ``clip=calibrated``. ``pow2``, ``kept``: as above
- ``shadow``: the ratio's value is that of two BF16 forwards, its gradient the FP8 forward's
- ``recomputed``: old log-probabilities are recomputed before each update, so every ratio is 1
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

from jetrl_verl.algorithms.calibrated_clipping import CalibratedClip
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.reference.constants import BLOCK, E4M3_MAX, FP8_DTYPE
from jetrl_verl.tools.demo import policy, warmup
from jetrl_verl.tools.demo.task import Problem, compute_score
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.train.shadow import bf16_linears
from jetrl_verl.train.shared_operations import share_operations

PROMPTS, GROUP, UPDATES = 8, 8, 4  # of a step
RESPONSE = 56  # longest response; the longest solution has 44 tokens
DIGITS = (2, 3, 4)
CLIP, DAPO = (0.2, 0.2), (0.2, 0.28)  # low, high
PRODUCTS = ("fp32", "bf16_stock", "bf16", "fp8", "pow2", "kept", "fp8_weights")
METHODS = ("bf16", "fixed", "shadow", "calibrated", "recomputed", "pow2", "kept")
WARM_UPS = {
    "warm": warmup.WarmupConfig(target=0.25),
    "warmer": warmup.WarmupConfig(target=0.8, lr=1e-3, seed=8),
    "good": warmup.WarmupConfig(target=0.92, lr=3e-4, seed=9),
}
"""Supervised, in FP32, until the estimated accuracy is the target."""


def draw_problems(draw: random.Random, count: int) -> list[Problem]:
    """Sums of two numbers of equal length, 2 to 4 digits."""
    problems = []
    for _ in range(count):
        low = 10 ** (draw.choice(DIGITS) - 1)
        problems.append(Problem(draw.randrange(low, 10 * low), draw.randrange(low, 10 * low)))
    return problems


@dataclass(frozen=True)
class Samples:
    """Sequences, padded at the end.

    Attributes:
        ids: ``[B, T]``. real: ``[B, T]`` bool, prompt and response. sampled: ``[B, T]`` bool, the response.
        advantages: ``[B]``. rewards: ``[B]``.
    """

    ids: torch.Tensor
    real: torch.Tensor
    sampled: torch.Tensor
    advantages: torch.Tensor
    rewards: torch.Tensor

    def rows(self, begin: int, end: int) -> "Samples":
        return Samples(*(tensor[begin:end] for tensor in vars(self).values()))

    def token_advantages(self) -> torch.Tensor:
        """``[sampled tokens]``"""
        return self.advantages[:, None].expand_as(self.sampled)[self.sampled]


@contextmanager
def with_rule(model: nn.Module, rule: str) -> Iterator[None]:
    """Inside the block FP8 layers have the scale rule ``rule``."""
    layers = [module for module in model.modules() if isinstance(module, JetLinear)]
    for layer in layers:
        layer.scale_rule = rule
        layer.drop_qdata()
    yield
    for layer in layers:
        layer.scale_rule = "fp32"
        layer.drop_qdata()


@contextmanager
def with_kept_scales(model: nn.Module, scales: dict[str, torch.Tensor]) -> Iterator[None]:
    """Inside the block weights are quantized with ``scales``: layer -> scales of its 128x128 blocks."""

    def quantize(layer: JetLinear, kept: torch.Tensor, weight: torch.Tensor):
        rows = kept.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        qdata = (weight.float() / rows).clamp(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)
        quantized = QuantizedTensor(qdata, kept)
        return quantized, layer.format.transpose_weight(quantized)

    for name, kept in scales.items():
        layer = model.get_submodule(name)
        layer._quantized = partial(quantize, layer, kept)
        layer.drop_qdata()
    yield
    for name in scales:
        layer = model.get_submodule(name)
        del layer._quantized
        layer.drop_qdata()


@contextmanager
def with_fp8_weights(model: nn.Module) -> Iterator[None]:
    """Inside the block linear layers are BF16 and have the dequantized values of the FP8 weights."""
    layers = [module for module in model.modules() if isinstance(module, JetLinear)]
    weights = [layer.weight.data.clone() for layer in layers]
    for layer in layers:
        quantized = layer.format.quantize_weight(layer.weight.data, layer.scale_rule)
        layer.weight.data.copy_(layer.format.dequantize_weight(quantized))
    with bf16_linears(model):
        yield
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data.copy_(weight)


class Policy:
    """FP32 master weights and the models that compute with them.

    Attributes:
        master: stock FP32 model. model: BF16 cast, FP8 linear layers, shared operations. sampler: the same with stock
            operations, which generates. stock: the stock BF16 model. The last three share their parameters.
        scales: of the FP8 weights at the last :meth:`keep_scales`.
    """

    def __init__(self, master: nn.Module, lr: float) -> None:
        self.master = master
        self.stock = copy.deepcopy(master).to(torch.bfloat16)
        self.sampler, self.model = copy.deepcopy(self.stock), copy.deepcopy(self.stock)
        for model in (self.sampler, self.model):
            for name, parameter in self.stock.named_parameters():
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, parameter)
            replace_linears(model, plan_linears(model.config), scale_rule="fp32")
        share_operations(self.model)
        self.optimizer = torch.optim.AdamW(master.parameters(), lr=lr, weight_decay=0.01)
        self.scales: dict[str, torch.Tensor] = {}
        self.cast()

    @torch.no_grad()
    def cast(self) -> None:
        """Write the master weights into the other models."""
        for master, parameter in zip(self.master.parameters(), self.stock.parameters(), strict=True):
            parameter.copy_(master)

    def keep_scales(self) -> None:
        layers = {name: m for name, m in self.model.named_modules() if isinstance(m, JetLinear)}
        self.scales = {name: layer.weight_qdata(layer.weight).scales for name, layer in layers.items()}

    def products(self, name: str, model: nn.Module) -> AbstractContextManager:
        """The linear layers of ``model`` under one of ``PRODUCTS``."""
        return {
            "bf16": bf16_linears,
            "pow2": partial(with_rule, rule="pow2"),
            "kept": partial(with_kept_scales, scales=self.scales),
            "fp8_weights": with_fp8_weights,
        }.get(name, nullcontext)(*([model] if name in ("bf16", "pow2", "kept", "fp8_weights") else []))

    def log_probs(self, samples: Samples, name: str = "fp8") -> torch.Tensor:
        """``[sampled tokens]`` FP32, under one of ``PRODUCTS``; of ``fp8`` within the caller's :meth:`products`."""
        ids, real = samples.ids, samples.real
        draws = torch.nn.functional.pad(samples.sampled[:, 1:], (0, 1))
        if name in ("fp32", "bf16_stock"):
            model = self.master if name == "fp32" else self.stock
            logits = model(input_ids=ids, use_cache=False).logits[draws]
        else:
            positions = torch.arange(ids.shape[1]).expand_as(ids)[real][None]
            with self.products(name, self.model), torch.autocast("cpu", torch.bfloat16):
                logits = self.model(input_ids=ids[real][None], position_ids=positions).logits[0, draws[real]]
        return logits.float().log_softmax(-1).gather(-1, ids[samples.sampled][:, None])[:, 0]

    def update(self, loss: torch.Tensor) -> None:
        """One step of AdamW on the master weights from the gradient of the BF16 parameters."""
        loss.backward()
        for master, parameter in zip(self.master.parameters(), self.stock.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.master.parameters(), 1.0)
        self.optimizer.step()
        self.cast()

    def state_dict(self) -> dict:
        return {"master": self.master.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict, lr: float) -> None:
        self.master.load_state_dict(state["master"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.cast()

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], length: int, stop: int, products: str) -> list[list[int]]:
        """One response to each prompt, up to and with ``stop``."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        arguments = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length, pad_token_id=0)
        with self.products(products, self.sampler), torch.autocast("cpu", torch.bfloat16):
            rows = self.sampler.generate(input_ids=ids, attention_mask=mask, eos_token_id=stop, **arguments)
        responses = [row[longest:].tolist() for row in rows]
        return [row[: row.index(stop) + 1] if stop in row else row for row in responses]


def pack(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], rewards: Sequence[float]) -> Samples:
    """Samples of groups of ``GROUP``, with GRPO's advantages."""
    lengths = [(len(prompt), len(prompt) + len(response)) for prompt, response in zip(prompts, responses, strict=True)]
    ids = torch.zeros(len(prompts), max(end for _, end in lengths), dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, : lengths[row][1]] = torch.tensor([*prompt, *response])
    place, (begin, end) = torch.arange(ids.shape[1]), torch.tensor(lengths).T[..., None]
    groups = torch.tensor(rewards).view(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    return Samples(ids, place < end, (place >= begin) & (place < end), advantages.flatten(), groups.flatten())


def sample_sums(actor: Policy, tokenizer, seed: int, step: int, prompts: int, products: str) -> Samples:
    """A batch of the task: ``prompts`` problems, ``GROUP`` responses to each."""
    torch.manual_seed(1000 * seed + step)
    problems = [p for p in draw_problems(random.Random(f"{seed}/{step}"), prompts) for _ in range(GROUP)]
    ids = [warmup.prompt_ids(problem, tokenizer) for problem in problems]
    responses = actor.sample(ids, RESPONSE, tokenizer.eos_token_id, products)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    scores = [compute_score("", t, p.answer)["score"] for t, p in zip(texts, problems, strict=True)]
    return pack(ids, responses, scores)


def sample_words(actor: Policy, seed: int, step: int) -> Samples:
    """A batch of the random policy: 4 prompts, responses of 8 to 24 tokens, rewards of a coin."""
    torch.manual_seed(1000 * seed + step)
    draw = random.Random(f"{seed}/{step}")
    words = actor.stock.config.vocab_size
    prompts = [[draw.randrange(1, words) for _ in range(8)] for _ in range(UPDATES) for _ in range(GROUP)]
    responses = [row[: draw.randrange(8, 25)] for row in actor.sample(prompts, 24, 0, "fp8")]
    return pack(prompts, responses, [float(draw.random() < 0.5) for _ in prompts])


def policy_loss(old, log_prob, advantages, bounds=CLIP) -> tuple[torch.Tensor, dict]:
    """verl's loss of ``[tokens]``, the mean over tokens, and its metrics."""
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=bounds[0], clip_ratio_high=bounds[1])
    config.get, config.global_batch_info = lambda key, default: default, {}
    rows = [tensor[None] for tensor in (old, log_prob, advantages, torch.ones_like(advantages))]
    return compute_policy_loss_vanilla(*rows, config=config)


class Method:
    """One of ``METHODS`` over a run."""

    def __init__(self, name: str, interval: int = 20) -> None:
        self.name = name
        self.products = name if name in ("bf16", "pow2", "kept") else "fp8"
        self.sampled = name if name in ("bf16", "pow2") else "fp8"  # a step samples before its first update
        self.clip = CalibratedClip(interval) if name == "calibrated" else None

    @torch.no_grad()
    def start(self, actor: Policy, samples: Samples) -> None:
        """Before the first update of a step."""
        actor.keep_scales()
        self.old = actor.log_probs(samples, self.products)
        if self.clip:
            self.clip.start_step("cpu")
        if self.name == "shadow" or (self.clip and self.clip.calibrating):
            self.old_bf16 = actor.log_probs(samples, "bf16")

    def update(self, actor: Policy, samples: Samples, tokens: slice) -> dict:
        """One update; ``tokens`` of the step's batch belong to ``samples``. Returns verl's metrics."""
        old, advantages, bounds = self.old[tokens], samples.token_advantages(), CLIP
        shadow = None
        if self.name == "shadow" or (self.clip and self.clip.calibrating):
            with torch.no_grad():
                shadow = actor.log_probs(samples, "bf16") - self.old_bf16[tokens]
        with actor.products(self.products, actor.model):
            log_prob = actor.log_probs(samples)
            if self.name == "shadow":
                log_prob = log_prob + (old + shadow - log_prob).detach()
            elif self.name == "recomputed":
                old = log_prob.detach()
            elif self.clip:
                bounds = 1 - self.clip.low, self.clip.high - 1
                if shadow is not None:
                    ratio, every = torch.exp(log_prob.detach() - old), torch.ones_like(advantages, dtype=torch.bool)
                    self.clip.statistics.add(ratio, shadow.exp(), advantages, every, 1 - CLIP[0])
            loss, metrics = policy_loss(old, log_prob, advantages, bounds)
            actor.update(loss)
        return metrics


def take_updates(actor: Policy, samples: Samples, method: Method, watch: Callable | None = None) -> dict[str, float]:
    """A step's updates; ``watch(update, part, tokens)`` is called before each. Returns means of verl's metrics."""
    method.start(actor, samples)
    size, seen, metrics = len(samples.ids) // UPDATES, 0, []
    for update in range(UPDATES):
        part = samples.rows(size * update, size * (update + 1))
        tokens = slice(seen, seen + int(part.sampled.sum()))
        seen = tokens.stop
        if watch:
            watch(update, part, tokens)
        metrics.append(method.update(actor, part, tokens))
    return {name: sum(m[name] for m in metrics) / UPDATES for name in metrics[0]}


def observed(ratio: torch.Tensor, true: torch.Tensor, samples: Samples) -> dict[str, float]:
    """Sums over tokens of a log-ratio and its difference from the true one, and over responses of their means."""
    advantages, lengths = samples.token_advantages(), samples.sampled.sum(1)
    means = [torch.segment_reduce(x, "mean", lengths=lengths).double() for x in (ratio, true)]
    zero = torch.zeros_like(ratio)
    clipped = [policy_loss(zero, ratio, advantages, bounds)[1]["actor/pg_clipfrac"] for bounds in (CLIP, DAPO)]
    leaves = [(ratio.exp() < 1 - low) | (ratio.exp() > 1 + high) for low, high in (CLIP, DAPO)]
    return {
        "square": ratio.double().square().sum().item(),
        "noise": (ratio - true).double().square().sum().item(),
        "response_square": means[0].square().sum().item(),
        "response_noise": (means[0] - means[1]).square().sum().item(),
        "k3": (ratio.double().expm1() - ratio).sum().item(),
        **{f"leaves_{name}": mask.sum().item() for name, mask in zip(("clip", "dapo"), leaves, strict=True)},
        **{f"clipped_{name}": value * len(ratio) for name, value in zip(("clip", "dapo"), clipped, strict=True)},
    }


def measure_step(actor: Policy, samples: Samples) -> list[dict]:
    """Updates two to four of a step with the method ``fixed``: sums of each product."""
    actor.keep_scales()
    records, exact = [], []
    with torch.no_grad():
        old = {name: actor.log_probs(samples, name) for name in PRODUCTS if name != "kept"}
    old["kept"] = old["fp8"]

    @torch.no_grad()
    def watch(update: int, part: Samples, tokens: slice) -> None:
        ratios = {name: actor.log_probs(part, name) - old[name][tokens] for name in PRODUCTS}
        if not update:
            exact.extend(not ratios[name].any() for name in ("fp8", "pow2", "kept"))
            return
        by_product = {name: observed(ratio, ratios["fp32"], part) for name, ratio in ratios.items()}
        sizes = {"tokens": int(part.sampled.sum()), "responses": len(part.ids)}
        records.append({"update": update + 1, **sizes, "products": by_product})

    take_updates(actor, samples, Method("fixed"), watch)
    facts = {
        "first_update_exact": all(exact),
        "log_prob": old["fp32"].mean().item(),
        "gap_fp8": (old["fp8"] - old["fp32"]).std().item(),
        "gap_bf16": (old["bf16"] - old["fp32"]).std().item(),
        "reward": samples.rewards.mean().item(),
        "lengths": [int(n) for n in samples.sampled.sum(1).aminmax()],
    }
    return [record | facts for record in records]


def append(path: Path, record: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def save(state: dict, path: Path) -> None:
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def make_policy(options: argparse.Namespace, ends: float) -> None:
    """Write ``WARM_UPS``, each after the one before; ``train`` starts from the first."""
    tokenizer = policy.build_tokenizer()
    model = policy.build_model(policy.POLICIES["dense"], tokenizer)
    for name, config in WARM_UPS.items():
        path = options.out / f"{name}.pt"
        if path.exists():
            model.load_state_dict(torch.load(path)["master"])
        else:
            problems = draw_problems(random.Random(name), 16384)
            warmup.warm_up(model, tokenizer, problems, config, partial(print, flush=True))
            save(Policy(model, options.lr).state_dict(), path)


def wide_master(seed: int) -> nn.Module:
    """Qwen3-0.6B's width with 4 layers and 4,096 words, weights drawn as transformers initializes them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=4096, num_hidden_layers=4, tie_word_embeddings=False, **sizes))


def measure_noise(options: argparse.Namespace, ends: float) -> None:
    """``options.steps`` steps of each seed; a seed's steps follow each other."""
    tokenizer = policy.build_tokenizer()
    name, wide = f"noise_{options.start}_{options.lr:g}", options.start == "wide"
    for seed in options.seeds:
        progress, records = options.out / f"{name}_{seed}.pt", options.out / f"{name}.jsonl"
        start = wide_master(seed) if wide else policy.build_model(policy.POLICIES["dense"], tokenizer)
        actor, step = Policy(start, options.lr), 0
        if progress.exists() or not wide:
            state = torch.load(progress if progress.exists() else options.out / f"{options.start}.pt")
            actor.load_state_dict(state, options.lr)
            step = state.get("step", 0)
        while step < options.steps and time.monotonic() < ends:
            if wide:
                samples = sample_words(actor, seed, step)
            else:
                samples = sample_sums(actor, tokenizer, seed, step, PROMPTS, "fp8")
            for record in measure_step(actor, samples):
                append(records, {"lr": options.lr, "start": options.start, "seed": seed, "step": step + 1, **record})
            step += 1
            save(actor.state_dict() | {"step": step}, progress)
            print(f"{name}: seed {seed}, step {step}", flush=True)


def train(options: argparse.Namespace, ends: float) -> None:
    """``options.steps`` steps of each method and seed from the warmed-up policy."""
    tokenizer = policy.build_tokenizer()
    for seed in options.seeds:
        for name in options.methods:
            progress, records = options.out / f"train_{name}_{seed}.pt", options.out / "train.jsonl"
            actor = Policy(policy.build_model(policy.POLICIES["dense"], tokenizer), options.lr)
            method, step = Method(name, options.interval), 0
            state = torch.load(progress if progress.exists() else options.out / "warm.pt")
            actor.load_state_dict(state, options.lr)
            if "step" in state:
                step = state["step"]
                if method.clip:
                    method.clip.load_state_dict(state["clip"])
            while step < options.steps and time.monotonic() < ends:
                samples = sample_sums(actor, tokenizer, seed, step, PROMPTS, method.sampled)
                metrics = take_updates(actor, samples, method)
                step += 1
                reward = samples.rewards.mean().item()
                append(records, {"method": name, "seed": seed, "step": step, "reward": reward, **metrics})
                if method.clip:
                    method.clip.finish()
                clip = method.clip.state_dict() if method.clip else None
                save(actor.state_dict() | {"step": step, "clip": clip}, progress)
            print(f"{name}: seed {seed}, step {step}", flush=True)


def summary(records: Sequence[dict]) -> dict:
    """Of the sums of ``noise``: the true log-ratio's standard deviation, and means over tokens of each product."""
    count = {per: sum(record[per] for record in records) for per in ("tokens", "responses")}

    def mean(product: str, key: str, per: str = "tokens") -> float:
        return sum(record["products"][product][key] for record in records) / count[per]

    true, true_response = mean("fp32", "square"), mean("fp32", "response_square", "responses")
    products = {}
    for product in PRODUCTS:
        noise, response = mean(product, "noise"), mean(product, "response_noise", "responses")
        products[product] = {
            "noise_std": noise**0.5,
            "noise_share": noise / (noise + true),
            "noise_share_of_response_means": response / (response + true_response),
            **{key: mean(product, key) for key in ("clipped_clip", "clipped_dapo", "leaves_clip", "leaves_dapo", "k3")},
        }
    facts = {key: sum(r[key] for r in records) / len(records) for key in ("log_prob", "gap_fp8", "gap_bf16", "reward")}
    exact = all(record["first_update_exact"] for record in records)
    updates = {"updates": len(records), **count, "true_std": true**0.5, "first_update_exact": exact}
    return {**updates, **facts, "products": products}


def table(options: argparse.Namespace, ends: float) -> None:
    """Print both tables and write them to ``later_updates.json``."""
    result = {"build": provenance(), "noise": {}, "train": {}}
    for path in sorted(options.out.glob("noise_*.jsonl")):
        result["noise"][path.stem] = rows = summary(read(path))
        products = rows.pop("products")
        print(f"\n{path.stem}: {rows}")
        print(f"| products | {' | '.join(products['fp8'])} |")
        for product, numbers in products.items():
            print(f"| {product} | {' | '.join(f'{number:.2e}' for number in numbers.values())} |")
        rows["products"] = products
    for record in read(options.out / "train.jsonl"):
        runs = result["train"].setdefault(f"{record['method']}, seed {record['seed']}", {"rewards": [], "clipped": []})
        runs["rewards"].append(record["reward"])
        runs["clipped"].append(record["actor/pg_clipfrac"])
    for name, run in sorted(result["train"].items()):
        tens = [run["rewards"][i : i + 10] for i in range(0, len(run["rewards"]), 10)]
        rewards = " ".join(f"{sum(ten) / len(ten):.3f}" for ten in tens)
        clipped = sum(run["clipped"]) / len(run["clipped"])
        print(f"{name}: {len(run['rewards'])} steps, reward by ten {rewards}, clipped {clipped:.2e}")
    (options.out / "later_updates.json").write_text(json.dumps(result, indent=1))


COMMANDS = {"policy": make_policy, "noise": measure_noise, "train": train, "table": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, default=Path("outputs/later_updates"))
    parser.add_argument("--lr", type=float, default=2e-4, help="the demo's 2e-4")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--interval", type=int, default=20, help="jetrl.clip_interval of calibrated")
    parser.add_argument("--start", choices=[*WARM_UPS, "wide"], default="good", help="of noise; wide: random weights")
    parser.add_argument("--seconds", type=float, default=450, help="start no step after these")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    COMMANDS[options.command](options, time.monotonic() + options.seconds)


if __name__ == "__main__":
    main()
