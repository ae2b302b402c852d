# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised warm-up: teach the policy the task until about a quarter of the answers are right.

GRPO learns from prompts whose answers are neither all right nor all wrong. The warm-up stops at an estimated accuracy,
since the number of steps to it depends on the machine's arithmetic."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from jetrl_verl.inputs import UserError
from jetrl_verl.tools.demo.task import Problem

IGNORED_LABEL = -100  # cross_entropy's default ignore_index


@dataclass(frozen=True)
class WarmupConfig:
    """Hyperparameters of the warm-up.

    Attributes:
        target: estimated accuracy at which it stops. max_steps: steps after which it fails.
        check_problems: problems of the estimate, not trained on. check_every: steps between two estimates.
    """

    target: float = 0.25
    max_steps: int = 1500
    batch_size: int = 32
    lr: float = 2e-3
    lr_ramp_steps: int = 20
    check_problems: int = 128
    check_every: int = 5
    seed: int = 7

    def __post_init__(self):
        if not 0 < self.target < 1:
            raise ValueError(f"the warm-up target must lie between 0 and 1, not {self.target}")


def encode(problems: list[Problem], tokenizer):
    """Token ids and labels of ``problems``: prompt turn, solution, ``<|im_end|>``.

    Returns:
        ``(ids, labels)``, both int64 ``[problems, longest]``, padded at the end. Labels are ``IGNORED_LABEL`` on prompt
        and padding.
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
    """Token ids of the prompt with generation prompt, as verl's agent loop builds them."""
    turn = [{"role": "user", "content": problem.prompt}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)


def solution_probability(model, ids, labels) -> float:
    """Mean over rows of the probability of exactly the labelled tokens at temperature 1.

    It estimates the sampled accuracy with one forward pass.
    """
    import torch

    with torch.no_grad():
        log_probs = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), dim=-1)
    targets = labels[:, 1:]
    labelled = targets != IGNORED_LABEL
    chosen = log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen * labelled).sum(dim=-1).exp().mean().item()


def warm_up(
    model,
    tokenizer,
    problems: list[Problem],
    config: WarmupConfig,
    report: Callable[[str], None],
    estimate: Callable[..., float] = solution_probability,
) -> dict:
    """Train ``model`` (FP32, on any device) in place with AdamW until ``config.target``.

    ``report`` receives lines for the user. ``estimate`` gets model, ids and labels as :func:`encode` makes them and
    returns the accuracy. Returns ``warmup_steps``, ``warmup_accuracy`` (the estimate) and
    ``warmup_seconds``. Raises ``UserError`` if the target is not reached within ``config.max_steps``, ``ValueError``
    for too few problems.
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
            accuracy = estimate(model, ids[held_back], labels[held_back])
            if step % (10 * config.check_every) == 0:
                report(f"warm-up: step {step}, estimated accuracy {accuracy:.2f}")
            if accuracy >= config.target:
                seconds = round(time.monotonic() - started, 1)
                return {"warmup_steps": step, "warmup_accuracy": accuracy, "warmup_seconds": seconds}
    raise UserError(
        f"the warm-up did not reach an accuracy of {config.target} in {config.max_steps} steps; "
        "give it more steps or an easier task"
    )
