# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How far the FP8 flow's trainer and a BF16 trainer are from one FP8 rollout, on the same tokens.

``jet_fp8`` and ``fp8_rollout`` share the rollout's arithmetic; with stock operations they differ only in the trainer's
linear layers, so one rollout serves both. k3_kl has a heavy tail: its means over two runs of a few thousand tokens
differ by half. A new process keeps other tests' engine modules out.
"""

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

RULE = "fp32"
PROMPTS, TOKENS = 384, 48

Rows = list[torch.Tensor]


def load_policy(folder: Path):
    """Model, in BF16 as stored, and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(folder)


def sample(folder: Path) -> tuple[list[list[int]], list[list[int]], Rows]:
    """Prompts, responses and the FP8 rollout's log-probability of each response token."""
    import vllm_engine
    from streams import parts_of_model
    from vllm import SamplingParams

    from jetrl_verl.config.options import JetConfig
    from jetrl_verl.tools.demo import task
    from jetrl_verl.tools.demo.warmup import prompt_ids

    model, tokenizer = load_policy(folder)
    problems = random.Random(3).sample(task.make_splits(task.TaskConfig())["train"], PROMPTS)
    prompts = [prompt_ids(problem, tokenizer) for problem in problems]
    options = JetConfig("fp8_rollout", train="bf16", rollout="fp8", scale_rule=RULE)
    llm, worker = vllm_engine.start(folder, options, load_format="dummy", max_model_len=96, max_num_seqs=64)
    worker.monkey_patch_model(len(tokenizer))
    vllm_engine.sync(worker, parts_of_model(model, rule=RULE))
    sampling = SamplingParams(max_tokens=TOKENS, temperature=1.0, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    responses = [list(output.outputs[0].token_ids) for output in outputs]
    log_probs = [
        torch.tensor([entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, response)])
        for output, response in zip(outputs, responses)
    ]
    return prompts, responses, log_probs


def distances(model, prompts: list[list[int]], responses: list[list[int]], rollout: Rows) -> Rows:
    """The trainer's log-probability minus the rollout's of every response token, FP64."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(p + r) for p, r in zip(prompts, responses)], True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        # Padding comes after every scored token, so causal attention needs no mask.
        logits = torch.cat([model(input_ids=part, use_cache=False).logits[:, :-1].float() for part in padded.split(32)])
    trainer = torch.log_softmax(logits, dim=-1).gather(-1, padded[:, 1:, None]).squeeze(-1)
    return [
        (row[len(prompt) - 1 :][: len(sampled)] - sampled).double()
        for row, prompt, sampled in zip(trainer, prompts, rollout)
    ]


def measure(folder: Path) -> tuple[Rows, Rows]:
    """Distances of the FP8 flow's trainer and of a BF16 trainer to the rollout."""
    import vllm_engine

    from jetrl_verl import cpu_platform

    cpu_platform.install()
    with vllm_engine.cpu_settings():
        sampled = sample(folder)

    from jetrl_verl.models.plan import plan_linears
    from jetrl_verl.nn.chunked_logits import mask_unused_vocabulary
    from jetrl_verl.nn.replace import replace_linears
    from jetrl_verl.train.shadow import bf16_linears

    model, tokenizer = load_policy(folder)
    replace_linears(model, plan_linears(model.config), scale_rule=RULE, backward="fp8")
    mask_unused_vocabulary(model, len(tokenizer))
    unified = distances(model, *sampled)
    with bf16_linears(model):
        return unified, distances(model, *sampled)


def test_jet_fp8_has_less_mismatch_than_fp8_rollout(policy, monkeypatch):
    """The mean of |d|, d the difference of log-probabilities, drops by more than three standard errors of the paired
    difference between sequences. k3_kl depends on a few tokens in a thousand.
    """
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        unified, rollout_only = pool.submit(measure, policy.policy).result()
    for name, rows in (("jet_fp8", unified), ("fp8_rollout", rollout_only)):
        d = torch.cat(rows)
        print(f"{name}: {len(d)} tokens, k3_kl {(d.exp() - d - 1).mean():.2e}, mean |d| {d.abs().mean():.2e}")
    gain = torch.stack([b.abs().mean() - a.abs().mean() for a, b in zip(unified, rollout_only)])
    error = gain.std() / len(gain) ** 0.5
    print(f"difference of mean |d| {gain.mean():.2e}, standard error {error:.1e}")
    assert torch.cat(unified).abs().max() > 0
    assert gain.mean() > 3 * error
