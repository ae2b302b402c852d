# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The policy of docs/evidence.md: warmed up on the task, then planted with outliers that change no bit of its function.

    python3 -m benchmarks.evidence.policy OUT [--tiny]      # OUT/policy, OUT/{train,test}.parquet, OUT/facts.json
    python3 -m benchmarks.evidence.policy OUT --scan 15,16,16.5  # k3_kl of fp8_rollout, planted with 2^15, ...

``OUT/policy`` (48 MB in BF16) is not planted; a run plants a copy. ``--scan`` needs a GPU to itself or a CPU.

Some channels of the residual stream and some neurons of the MLPs are reserved before the warm-up: all weights that
write or scale them are zero. A reserved channel is 0 in the residual stream and its norms multiply it by 0, a reserved
neuron is silu(0) * 0. The gradients of all that touches them are then exactly 0, so AdamW leaves them at 0, and a
weight that joins two of them takes any value without changing an output or a gradient. :func:`plant` gives one such
weight in each 128x128 block of gate, up and down a multiple of the block's largest magnitude. The block's FP8 scale
grows by that factor and its other weights round to a coarser grid. BF16, INT8 and Adam's steps stay as they are.
"""

import argparse
import json
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.evidence import task
from jetrl_verl.inputs import UserError, load_json, reading, writing
from jetrl_verl.reference.constants import BLOCK
from jetrl_verl.tools.demo import policy, warmup
from jetrl_verl.tools.demo.baseline import METRIC, BaselineRequest
from jetrl_verl.tools.demo.policy import PolicyConfig
from jetrl_verl.tools.demo.run import BASELINE
from jetrl_verl.tools.demo.task import write_parquet
from jetrl_verl.tools.demo.warmup import IGNORED_LABEL, WarmupConfig
from jetrl_verl.tools.diff.run import engine_environment
from jetrl_verl.tools.launch import RunPaths, build_environment, choose_device
from jetrl_verl.tools.provenance import provenance


@dataclass(frozen=True)
class Size:
    """All that decides what ``OUT`` holds.

    Attributes:
        policy: shape. levels: steps of the chains, in equal shares. train, test, warmup: problems.
        warm_ups: one after the other; the last has the accuracy at which runs start.
    """

    policy: PolicyConfig
    levels: tuple[int, ...]
    train: int
    test: int
    warmup: int
    warm_ups: tuple[WarmupConfig, ...]


FULL = Size(
    PolicyConfig(hidden_size=512, layers=8, heads=4, kv_heads=2, intermediate_size=1408, max_positions=2048),
    levels=(13, 14, 15, 16),
    train=8192,
    test=1024,
    warmup=16384,
    # The second, at a lower learning rate, so that RL does not begin by calming the jitter of the weights.
    warm_ups=(
        WarmupConfig(target=0.2, max_steps=3000, batch_size=64, lr=1e-3, lr_ramp_steps=100),
        WarmupConfig(target=0.4, max_steps=1000, batch_size=64, lr=2e-4, seed=8),
    ),
)
TINY = Size(
    PolicyConfig(max_positions=512),
    levels=(1, 2),
    train=64,
    test=8,
    warmup=64,
    warm_ups=(WarmupConfig(target=1e-30, batch_size=8, check_problems=8),),
)


def reserved(size: int) -> torch.Tensor:
    """Indices of the reserved ones of ``size`` channels or neurons: one in each block."""
    return torch.arange(0, size, BLOCK)


@torch.no_grad()
def reserve(model: nn.Module) -> None:
    """Set to zero what writes and scales the reserved channels and neurons of an untrained Qwen3."""
    channels, neurons = reserved(model.config.hidden_size), reserved(model.config.intermediate_size)
    model.model.embed_tokens.weight[:, channels] = 0
    norms = [model.model.norm]
    for layer in model.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight[channels] = 0
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
            projection.weight[neurons] = 0
        layer.mlp.down_proj.weight[:, neurons] = 0
    for norm in norms:
        norm.weight[channels] = 0


@torch.no_grad()
def plant(model: nn.Module, factor: float) -> None:
    """Give one weight in each block of gate, up and down ``factor`` times the block's largest magnitude."""
    channels, neurons = reserved(model.config.hidden_size), reserved(model.config.intermediate_size)
    for layer in model.model.layers:
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            rows, columns = (channels, neurons) if projection is layer.mlp.down_proj else (neurons, channels)
            weight = projection.weight
            blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            weight[rows[:, None], columns] = factor * blocks.abs().amax(dim=(1, 3))


def write_planted(out: Path, factor: float) -> Path:
    """A planted copy of ``out``'s policy; ``factor`` 0 stands for the policy as it is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = out / "policy"
    planted = out / f"planted_{factor:g}" if factor else source
    if not planted.exists():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        plant(model, factor)
        # Several runs may begin at once.
        with tempfile.TemporaryDirectory(dir=out) as folder:
            policy.save_policy(model, AutoTokenizer.from_pretrained(source), Path(folder) / "policy")
            with suppress(OSError):
                (Path(folder) / "policy").rename(planted)
    return planted


def probability_without_free_words(free: torch.Tensor, model: nn.Module, ids: torch.Tensor, labels) -> float:
    """``warmup.solution_probability`` of all tokens but the free words, which may be any."""
    judged = labels.masked_fill(torch.isin(labels, free.to(labels.device)), IGNORED_LABEL)
    return warmup.solution_probability(model, ids, judged)


def is_complete(size: Size, out: Path) -> bool:
    """Whether ``out`` has a policy. Raises ``UserError`` for one of another size, whose results would mix."""
    with reading(out / "facts.json", "record of a policy", "Name another OUT"):
        if not (out / "facts.json").exists():
            return False
        made = load_json(out / "facts.json")["size"]
    if made != json.loads(json.dumps(asdict(size))):
        raise UserError(f"{out} has a policy of another size or warm-up. Name another OUT, or --tiny for a tiny one.")
    return True


def prepare(size: Size, out: Path, device: str) -> None:
    """Fill ``out`` unless it is complete. Raises ``UserError`` if the warm-up does not reach its target."""
    if is_complete(size, out):
        print(f"{out} is complete")
        return
    with writing(out, "OUT"):
        out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        write_parquet(task.draw_problems(split, getattr(size, split), size.levels), split, out / f"{split}.parquet")
    tokenizer = policy.build_tokenizer()
    model = policy.build_model(size.policy, tokenizer)
    reserve(model)
    model.to(device)
    free = torch.tensor(tokenizer.convert_tokens_to_ids(list(task.FREE)))
    estimate, say = partial(probability_without_free_words, free), partial(print, flush=True)
    problems = task.draw_problems("warmup", size.warmup, size.levels)
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):  # the cache would keep the weights of step 0
        facts = [warmup.warm_up(model, tokenizer, problems, config, say, estimate) for config in size.warm_ups]
    policy.save_policy(model.cpu(), tokenizer, out / "policy")
    record = {"build": provenance(), "size": asdict(size), "parameters": model.num_parameters(), "warm_ups": facts}
    (out / "facts.json").write_text(json.dumps(record, indent=1))


def scan(out: Path, powers: list[float], levels: tuple[int, ...], device: str) -> None:
    """Print the k3_kl of ``fp8_rollout`` on the policy as it is and planted with powers of two; one engine for all."""
    factors = [0.0, *(2.0**power for power in powers)]
    policies = [(i, str(write_planted(out, factor))) for i, factor in enumerate(factors)]
    folder = out / "scan"
    folder.mkdir(exist_ok=True)
    metrics, response = folder / "metrics.jsonl", task.token_limits(levels)[1]
    BaselineRequest(policies, str(out / "test.parquet"), 64, response, str(metrics)).write(folder / "request.json")
    environment = build_environment(RunPaths(folder), device) | engine_environment(device == "cuda")
    subprocess.run([*BASELINE, str(folder / "request.json")], env=environment, check=True)
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        print(f"factor {factors[record['step']]:g}: k3_kl {record['data'][METRIC]:.2e}")


def powers(text: str) -> list[float]:
    return [float(power) for power in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--tiny", action="store_true", help="a policy of 1.3M parameters that learnt nothing")
    parser.add_argument("--scan", metavar="POWERS", type=powers, help="of two, the planted factor, with commas between")
    options = parser.parse_args()
    size, device = TINY if options.tiny else FULL, choose_device("auto")
    out = options.out.resolve()
    try:
        prepare(size, out, device)
    except UserError as error:
        parser.error(str(error))
    if options.scan:
        scan(out, options.scan, size.levels, device)


if __name__ == "__main__":
    main()
