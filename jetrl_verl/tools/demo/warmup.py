# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised warm-up: teach the policy the task until it is right about two times in five, so that RL has a signal.

GRPO learns from prompts whose sampled answers are neither all right nor all wrong. An untrained policy is never right;
a finished one always. So training on worked solutions stops as soon as the expected accuracy at temperature 1 reaches a
target, rather than after a fixed number of steps, whose outcome would vary with the machine's arithmetic.

The stopping estimate is the mean probability of the whole worked solution on problems kept out of the warm-up. It needs
one forward pass and no sampling, and is a lower bound of the sampled accuracy up to noise (a right answer can also
follow a wrong line). Weights and AdamW are FP32; the policy is saved in BF16, and ``sampled_accuracy`` measures that.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from jetrl_verl.tools.demo import DemoError
from jetrl_verl.tools.demo.task import Problem

IGNORED_LABEL = -100  # cross_entropy's default ignore_index


@dataclass(frozen=True)
class WarmupConfig:
    """Hyperparameters of the warm-up.

    ``target`` is the estimated accuracy at which it stops, ``max_steps`` the number of steps after which reaching it
    has failed, ``check_problems`` how many problems are held back from training for the estimate, taken every
    ``check_every`` steps.
    """

    target: float = 0.4
    max_steps: int = 1500
    batch_size: int = 32
    lr: float = 2e-3
    lr_ramp_steps: int = 20
    check_problems: int = 128
    check_every: int = 10
    seed: int = 7

    def __post_init__(self):
        if not 0 < self.target < 1:
            raise ValueError(f"the warm-up target must lie between 0 and 1, not {self.target}")


def encode(problems: list[Problem], tokenizer):
    """Token ids and labels of ``problems`` as the policy is meant to see them: prompt turn, solution, ``<|im_end|>``.

    Returns:
        ``(ids, labels)``, both int64 of shape [problems, longest]; shorter rows are padded at the end. Labels are
        ``IGNORED_LABEL`` on prompt and padding.
    """
    import torch

    rows = []
    for problem in problems:
        prompt = prompt_ids(problem, tokenizer)
        answer = tokenizer.encode(problem.solution, add_special_tokens=False) + [tokenizer.eos_token_id]
        rows.append((prompt + answer, [IGNORED_LABEL] * len(prompt) + answer))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED_LABEL)
    for i, (row_ids, row_labels) in enumerate(rows):
        ids[i, : len(row_ids)] = torch.tensor(row_ids)
        labels[i, : len(row_labels)] = torch.tensor(row_labels)
    return ids, labels


def prompt_ids(problem: Problem, tokenizer) -> list[int]:
    """Token ids of the prompt, generation prompt included, exactly as verl's agent loop makes them."""
    turn = [{"role": "user", "content": problem.prompt}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)


def warm_up(
    model, tokenizer, problems: list[Problem], config: WarmupConfig, on_check: Callable[[int, float], None]
) -> dict:
    """Train ``model`` (FP32, on any device) in place until ``config.target``.

    ``on_check(step, estimate)`` is called at every check. Returns ``{"steps", "estimate", "seconds"}``. Raises
    ``DemoError`` if the target is not reached within ``config.max_steps``, ``ValueError`` for too few problems.
    """
    import torch

    if len(problems) < config.check_problems + config.batch_size:
        raise ValueError(
            f"the warm-up needs at least {config.check_problems + config.batch_size} problems, not {len(problems)}"
        )
    started = time.monotonic()
    device = next(model.parameters()).device
    ids, labels = (tensor.to(device) for tensor in encode(problems, tokenizer))
    held_back, pool = slice(0, config.check_problems), torch.arange(config.check_problems, len(problems))
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / config.lr_ramp_steps))

    model.train()
    for step in range(1, config.max_steps + 1):
        rows = pool[torch.randint(len(pool), (config.batch_size,), generator=generator)].to(device)
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % config.check_every == 0:
            estimate = solution_probability(model, ids[held_back], labels[held_back])
            on_check(step, estimate)
            if estimate >= config.target:
                return {"steps": step, "estimate": estimate, "seconds": time.monotonic() - started}
    raise DemoError(
        f"the warm-up did not reach an accuracy of {config.target} in {config.max_steps} steps; "
        "give it more steps or an easier task"
    )


def solution_probability(model, ids, labels) -> float:
    """Mean over rows of the probability that sampling at temperature 1 writes exactly the labelled tokens."""
    import torch

    with torch.no_grad():
        log_probs = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), dim=-1)
    targets = labels[:, 1:]
    labelled = targets != IGNORED_LABEL
    chosen = log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen * labelled).sum(dim=-1).exp().mean().item()


def sampled_accuracy(model, tokenizer, problems: list[Problem], temperature: float = 1.0, seed: int = 7) -> float:
    """Share of ``problems`` answered rightly in one sample each, as :func:`sampled_scores` has them."""
    return fmean(sampled_scores(model, tokenizer, problems, temperature, seed))


def sampled_scores(model, tokenizer, problems: list[Problem], temperature: float = 1.0, seed: int = 7) -> list[float]:
    """1 or 0 for each of ``problems``: one sample each (``temperature=0``: greedily), graded by the reward."""
    import torch

    from jetrl_verl.tools.demo.task import DATA_SOURCE, compute_score

    device = next(model.parameters()).device
    rows = [prompt_ids(problem, tokenizer) for problem in problems]
    width = max(map(len, rows))
    # Padded on the left, so that all answers begin at one position.
    prompts = torch.tensor([[tokenizer.pad_token_id] * (width - len(ids)) + ids for ids in rows], device=device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows], device=device)
    longest = max(len(tokenizer.encode(problem.solution)) for problem in problems) + 16
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        model.eval()
        output = model.generate(prompts, attention_mask=mask, max_new_tokens=longest, **sampling)
    texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return [compute_score(DATA_SOURCE, text, problem.answer)["acc"] for text, problem in zip(texts, problems)]
