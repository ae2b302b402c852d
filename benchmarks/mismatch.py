# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How far rollout and trainer are apart, per precision, and which operation the distance comes from.

A Qwen3-shaped model of about 100M parameters is warmed up on chains of worked additions, vLLM samples long responses
from it at temperature 1, and the trainer's model computes the log-probability of every sampled token again, as verl's
``old_log_prob`` does. With ``d = log pi_train - log pi_rollout`` per token:

    k3_kl = mean(exp(d) - 1 - d)     p99.9 and max of |d|     entropy of the trainer's policy beside them

Precisions: ``bf16`` (both BF16), ``fp8_rollout`` (FP8 rollout, BF16 trainer), ``jet_fp8`` (the same rollout, FP8
trainer), ``jet_fp8_exact`` (the operations between the linears shared too). ``exact-stressed`` is the last with a KV
cache for a third of the requests and 256 tokens a step, so that prompts are chunked and requests preempted, prefixes
come from the cache, and everything is computed in other batches than the trainer's.

    python benchmarks/mismatch.py --out benchmarks/results/mismatch.json
    python benchmarks/mismatch.py --out benchmarks/results/mismatch_8k.json --prompts 32 --response 8000

One GPU, about four minutes. Each engine runs in a process of its own, so that its memory is free afterwards. Exit
status 1 unless every log-probability of ``jet_fp8_exact`` is equal in all 32 bits. ``--operations`` also replaces the
operations between the linears of ``jet_fp8``'s trainer by vLLM's own kernels, one at a time.
"""

import argparse
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from jetrl_verl import kernels
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.rollout.arguments import vllm_arguments
from jetrl_verl.sync.wire import quantize_stream
from jetrl_verl.tools.demo.policy import PolicyConfig, build_model, build_tokenizer, load_policy, save_policy
from jetrl_verl.tools.demo.task import Problem
from jetrl_verl.tools.demo.warmup import prompt_ids
from jetrl_verl.tools.provenance import provenance
from jetrl_verl.train.shared_operations import share_operations

SHAPE = PolicyConfig(
    hidden_size=768, layers=12, heads=6, kv_heads=2, head_dim=128, intermediate_size=3072, max_positions=9216
)
ROLLOUTS = ("bf16", "fp8", "exact", "exact-stressed")
WARM_UP_TOKENS = 1024
OPERATIONS = ("norm", "silu", "rotary", "attention", "head")


def chain(generator: random.Random, problems: int) -> str:
    """A response of about a thousand tokens: additions, each posed and worked out."""
    lines = []
    for _ in range(problems):
        problem = Problem(generator.randint(1000, 9999), generator.randint(1000, 9999))
        lines.append(f"{problem.prompt}\n{problem.solution}")
    return "\n".join(lines)


def warm_up(folder: Path, steps: int, batch: int, length: int) -> dict:
    """Train the policy to predict chains and write it to ``folder``."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(SHAPE, tokenizer).cuda()
    generator = random.Random(0)
    documents = []
    for _ in range(2048):
        prompt = prompt_ids(Problem(generator.randint(1000, 9999), generator.randint(1000, 9999)), tokenizer)
        documents.append((prompt + tokenizer.encode(chain(generator, 26)))[: length + 1])
    ids = torch.tensor([d for d in documents if len(d) == length + 1]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    started = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 40)
        rows = ids[torch.randint(len(ids), (batch,))]
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    parameters = sum(p.numel() for p in model.parameters())
    save_policy(model, tokenizer, folder)
    return {"parameters": parameters, "loss": loss.item(), "seconds": time.monotonic() - started}


def sample(folder: Path, rollout: str, rule: str, prompts: int, response: int) -> dict:
    """Sample with vLLM: token ids and the rollout's log-probabilities.

    Args:
        rollout: one of ``ROLLOUTS``, with ``-eager`` behind it without torch.compile and CUDA graphs.
    """
    from vllm import LLM, SamplingParams

    arguments: dict = {"enforce_eager": rollout.endswith("eager")}
    exact = rollout.startswith("exact")
    if rollout != "bf16":
        if exact:
            options = JetConfig("jet_fp8_exact", train="fp8", rollout="fp8", scale_rule=rule, operations="shared")
        else:
            options = JetConfig("fp8_rollout", train="bf16", rollout="fp8", scale_rule=rule)
        arguments |= {"load_format": "dummy", **vllm_arguments(options, None)}
    if rollout == "exact-stressed":
        blocks = prompts * (response + 64) // 16 // 3
        arguments |= {"max_num_batched_tokens": 256, "num_gpu_blocks_override": blocks, "enable_prefix_caching": True}
    started = time.monotonic()
    llm = LLM(
        str(folder),
        dtype="bfloat16",
        max_model_len=response + 512,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=8 * 2**30,
        seed=0,
        max_num_seqs=256,
        disable_log_stats=False,
        **arguments,
    )
    ready = time.monotonic() - started
    if rollout != "bf16":
        model, _ = load_policy(folder)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        stream = ((n, t.cuda()) for n, t in model.state_dict().items())
        worker.model_runner.model.load_weights(quantize_stream(stream, plan_linears(model.config), rule))
    tokenizer = build_tokenizer()
    generator = random.Random(1)
    heads = [
        prompt_ids(Problem(generator.randint(1000, 9999), generator.randint(1000, 9999)), tokenizer)
        for _ in range(prompts)
    ]
    started = time.monotonic()
    outputs = llm.generate(
        [{"prompt_token_ids": head} for head in heads],
        # Not min_tokens, which forbids tokens: the distribution sampled from would not be the model's.
        SamplingParams(temperature=1.0, max_tokens=response, ignore_eos=True, logprobs=0, seed=None, detokenize=False),
        use_tqdm=False,
    )
    seconds = time.monotonic() - started
    rows = []
    for head, output in zip(heads, outputs, strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        rows.append((head, tokens, [entry[t].logprob for entry, t in zip(completion.logprobs, tokens, strict=True)]))
    wanted = ("vllm:num_preemptions", "vllm:prefix_cache_hits")
    counters = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in wanted}
    return {"rows": rows, "engine_start_seconds": ready, "generate_seconds": seconds, **counters}


@contextlib.contextmanager
def vllm_operations(model: torch.nn.Module, names: set[str]):
    """Replace the named operations of the Hugging Face model by vLLM's kernels while the block runs."""
    from transformers.models.qwen3 import modeling_qwen3 as hf
    from vllm import _custom_ops as vllm_kernels

    saved = (hf.Qwen3RMSNorm.forward, hf.Qwen3MLP.forward, hf.apply_rotary_pos_emb, model.config._attn_implementation)
    head = model.lm_head.forward

    def norm(self, hidden_states):
        out = torch.empty_like(hidden_states)
        vllm_kernels.rms_norm(out, hidden_states.contiguous(), self.weight, self.variance_epsilon)
        return out

    def mlp(self, x):
        gate_up = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)
        out = torch.empty_like(gate_up[..., : gate_up.shape[-1] // 2])
        torch.ops._C.silu_and_mul(out, gate_up)
        return self.down_proj(out)

    def rotary(q, k, cos, sin, *args, **kwargs):
        batch, _, length, size = q.shape
        cache = torch.cat([cos[0, :, : size // 2], sin[0, :, : size // 2]], dim=-1).to(q.dtype)
        positions = torch.arange(length, device=q.device).repeat(batch)
        flat = [t.transpose(1, 2).reshape(batch * length, -1).contiguous() for t in (q, k)]
        vllm_kernels.rotary_embedding(positions, flat[0], flat[1], size, cache, True)
        return tuple(f.view(batch, length, -1, size).transpose(1, 2) for f in flat)

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        batch, heads, length, size = query.shape
        flat = [t.transpose(1, 2).reshape(batch * length, t.shape[1], size) for t in (query, key, value)]
        starts = torch.arange(0, (batch + 1) * length, length, device=query.device, dtype=torch.int32)
        out = flash_attn_varlen_func(
            *flat,
            max_seqlen_q=length,
            cu_seqlens_q=starts,
            max_seqlen_k=length,
            cu_seqlens_k=starts,
            softmax_scale=scaling,
            causal=True,
            fa_version=3,
        )
        return out.view(batch, length, heads, size), None

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("vllm_fa3", attention)
    # Without an entry of its own the mask would silently be None for every interface.
    ALL_MASK_ATTENTION_FUNCTIONS.register("vllm_fa3", lambda *args, **kwargs: None)
    try:
        if "norm" in names:
            hf.Qwen3RMSNorm.forward = norm
        if "silu" in names:
            hf.Qwen3MLP.forward = mlp
        if "rotary" in names:
            hf.apply_rotary_pos_emb = rotary
        if "attention" in names:
            model.config._attn_implementation = "vllm_fa3"
        if "head" in names:
            model.lm_head.forward = lambda x: F.linear(x.flatten(0, 1), model.lm_head.weight).unflatten(0, x.shape[:2])
        yield
    finally:
        hf.Qwen3RMSNorm.forward, hf.Qwen3MLP.forward, hf.apply_rotary_pos_emb, implementation = saved
        model.config._attn_implementation = implementation
        model.lm_head.forward = head


@torch.no_grad()
def compare(model: torch.nn.Module, rows: list, micro_batch: int, shared: bool = False) -> dict:
    """Mismatch statistics of ``rows`` (prompt, tokens, rollout log-probabilities) under ``model``.

    Args:
        shared: take log-probabilities from the shared operation too, as the engine does under ``jet_fp8_exact``.
    """
    differences, entropies = [], []
    for first in range(0, len(rows), micro_batch):
        part = rows[first : first + micro_batch]
        start = len(part[0][0])
        ids = torch.tensor([head + tokens for head, tokens, _ in part]).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[:, start - 1 : -1].float()
        logs = logits.log_softmax(-1)
        chosen = logs.gather(-1, ids[:, start:, None])[..., 0]
        if shared:
            tokens = ids[:, start:].reshape(-1, 1)
            chosen = kernels.log_probs(logits.flatten(0, 1), tokens, logits.new_ones(len(tokens))).view_as(chosen)
        differences.append(chosen.double().cpu() - torch.tensor([r[2] for r in part], dtype=torch.float64))
        entropies.append(-(logs.exp() * logs).sum(-1).double().cpu())
    d = torch.cat(differences).flatten()
    return {
        "tokens": d.numel(),
        "differing": int((d != 0).sum()),
        "k3_kl": (d.exp() - 1 - d).mean().item(),
        "mean_abs": d.abs().mean().item(),
        "p999_abs": d.abs().kthvalue(math.ceil(0.999 * d.numel())).values.item(),
        "max_abs": d.abs().max().item(),
        "equal": (d == 0).double().mean().item(),
        "entropy": torch.cat(entropies).mean().item(),
    }


def run_child(arguments: list[str]) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        subprocess.run([sys.executable, __file__, "--child", file.name, *arguments], check=True, env=environment)
        return json.loads(Path(file.name).read_text())


def one_operation_at_a_time(bf16: torch.nn.Module, jet: torch.nn.Module, samples: dict, batch: int) -> dict:
    """Mismatch with vLLM's kernels for one operation, all, and all but one, in the trainer."""
    results = {}
    with vllm_operations(bf16, set(OPERATIONS)):
        results["bf16 + all of vLLM's operations"] = compare(bf16, samples["bf16"]["rows"], batch)
    for names in [*({name} for name in OPERATIONS), set(OPERATIONS), *(set(OPERATIONS) - {n} for n in OPERATIONS)]:
        missing = set(OPERATIONS) - names
        label = "all" if not missing else " ".join(names) if len(names) == 1 else f"all but {' '.join(missing)}"
        with vllm_operations(jet, names):
            results[f"jet_fp8 + vLLM's {label}"] = compare(jet, samples["fp8"]["rows"], batch)
    eager = samples["fp8-eager"]["rows"]
    results["jet_fp8, eager rollout"] = compare(jet, eager, batch)
    with vllm_operations(jet, set(OPERATIONS)):
        results["jet_fp8, eager rollout + vLLM's all"] = compare(jet, eager, batch)
        one_by_one = compare(jet, eager, micro_batch=1)
    return results | {"jet_fp8, eager rollout + vLLM's all, micro-batch 1": one_by_one}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rule", default="fp32")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=None, help="where the warmed-up policy is kept")
    parser.add_argument("--rollouts", default=",".join(ROLLOUTS), help="with commas")
    parser.add_argument("--operations", action="store_true", help="also vLLM's own operations in jet_fp8's trainer")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rollout", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        result = sample(options.folder, options.rollout, options.rule, options.prompts, options.response)
        options.child.write_text(json.dumps(result))
        return 0

    folder = options.folder or Path(tempfile.mkdtemp(prefix="mismatch-"))
    facts = {
        "build": provenance(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rule": options.rule,
    }
    if not (folder / "config.json").exists():
        facts["warm_up"] = warm_up(folder, options.steps, 32, WARM_UP_TOKENS)
        print("warm-up", facts["warm_up"], flush=True)
        torch.cuda.empty_cache()

    shared = ["--folder", str(folder), "--rule", options.rule, "--out", "-", "--prompts", str(options.prompts)]
    shared += ["--response", str(options.response)]
    rollouts = [*options.rollouts.split(","), *(["fp8-eager"] if options.operations else [])]
    samples = {rollout: run_child([*shared, "--rollout", rollout]) for rollout in rollouts}
    for rollout, result in samples.items():
        print(rollout, {k: v for k, v in result.items() if k != "rows"}, flush=True)

    batch = max(1, 8192 // options.response)
    results: dict[str, dict] = {}
    bf16, jet, exact = (load_policy(folder)[0].cuda().eval() for _ in range(3))
    for fp8 in (jet, exact):
        replace_linears(fp8, plan_linears(fp8.config), scale_rule=options.rule)
    share_operations(exact)
    runs = {
        "bf16": (bf16, "bf16", batch),
        "fp8_rollout": (bf16, "fp8", batch),
        "jet_fp8": (jet, "fp8", batch),
        "jet_fp8_exact": (exact, "exact", batch),
        "jet_fp8_exact, one sequence at a time": (exact, "exact", 1),
        "jet_fp8_exact, stressed rollout": (exact, "exact-stressed", batch),
    }
    for label, (model, rollout, size) in runs.items():
        if rollout in samples:
            results[label] = compare(model, samples[rollout]["rows"], size, shared=model is exact)
    if options.operations:
        results |= one_operation_at_a_time(bf16, jet, samples, batch)
    for rollout, result in samples.items():
        facts[f"{rollout}_engine_start_seconds"] = result["engine_start_seconds"]
        facts[f"{rollout}_generate_seconds"] = result["generate_seconds"]
        facts |= {f"{rollout} {name}": value for name, value in result.items() if name.startswith("vllm:")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    print(f"{'':52} {'k3_kl':>10} {'mean |d|':>10} {'p99.9 |d|':>10} {'max |d|':>10} {'equal':>7} {'entropy':>8}")
    for label, r in results.items():
        print(
            f"{label:52} {r['k3_kl']:10.3e} {r['mean_abs']:10.3e} {r['p999_abs']:10.3e} {r['max_abs']:10.3e} "
            f"{r['equal']:7.3f} {r['entropy']:8.4f}"
        )
    return 1 if any(r["differing"] for label, r in results.items() if label.startswith("jet_fp8_exact")) else 0


if __name__ == "__main__":
    sys.exit(main())
