# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The rollout's log-probabilities as the old ones, checked at every step (``jetrl.old_log_probs=rollout``).

verl's bypass mode skips the trainer's forward before the update, which under ``precision=jet_fp8_exact`` repeats the
rollout bit for bit. Here each step still runs one micro-batch a rank through the actor and compares every response
token in all 32 bits; a difference stops the run before the update. The window of sequences moves with the global step,
so after ``ceil(sequences / window)`` steps every position has been checked, also across a resume. Metrics of this
forward are those of the checked sequences.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from jetrl_verl.patches.batch_hooks import run_after_old_log_probs


class LogProbsDiffer(RuntimeError):
    """The actor's log-probability of a token differs from the rollout's."""


class Difference(NamedTuple):
    """The first token whose bits differ.

    Attributes:
        row: index among the checked sequences. token: position in the response.
        rollout, actor: both FP32 values. count, checked: number of tokens that differ, and that were compared.
    """

    row: int
    token: int
    rollout: float
    actor: float
    count: int
    checked: int


def rows_to_check(real: Sequence[bool], count: int, step: int) -> list[int]:
    """Rows of a batch that a step runs through the actor.

    Args:
        real: whether each row is a sequence of the rollout; the others are padding, used if there are too few.
        count: number of rows, at most the batch. step: the global step.

    Returns:
        Distinct rows, ascending.
    """
    sequences = [row for row, is_real in enumerate(real) if is_real]
    padding = [row for row, is_real in enumerate(real) if not is_real]
    if len(sequences) <= count:
        return sorted((sequences + padding)[:count])
    return sorted(sequences[(step * count + offset) % len(sequences)] for offset in range(count))


def first_difference(rollout: torch.Tensor, actor: torch.Tensor, mask: torch.Tensor) -> Difference | None:
    """Compare the bits of two sets of log-probabilities, so a NaN equals itself and 0 differs from -0.

    Args:
        rollout, actor: FP32, jagged ``[sequences, tokens]``. mask: jagged, non-zero on tokens that the policy sampled.

    Returns:
        None if all response tokens agree.

    Raises:
        ValueError: lengths differ, or a tensor is not FP32.
    """
    offsets = mask.offsets()
    for name, tensor in (("rollout", rollout), ("actor", actor)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"Expected log-probabilities of the {name} in float32, got {tensor.dtype}")
        if not torch.equal(tensor.offsets(), offsets):
            lengths = tensor.offsets().diff().tolist()
            raise ValueError(f"{lengths} log-probabilities of the {name} for {offsets.diff().tolist()} response tokens")
    sampled = mask.values().bool()
    left, right = rollout.values(), actor.values()
    different = (left.view(torch.int32) != right.view(torch.int32)) & sampled
    places = different.nonzero().flatten()
    if not len(places):
        return None
    first = int(places[0])
    # Empty sequences before the token's share its offset.
    row = int(torch.searchsorted(offsets, first, right=True)) - 1
    token = first - int(offsets[row])
    return Difference(row, token, left[first].item(), right[first].item(), len(places), int(sampled.sum()))


def rows_per_rank(rollout: Any) -> int:
    """Sequences of one micro-batch of the skipped forward, from verl's rollout config."""
    if rollout.log_prob_use_dynamic_bsz:
        longest = rollout.prompt_length + rollout.response_length
        return max(1, rollout.log_prob_max_token_len_per_gpu // longest)
    return rollout.log_prob_micro_batch_size_per_gpu or 1


def check(trainer: Any, batch: Any) -> dict[str, float]:
    """Run one micro-batch a rank through the actor and compare with what the rollout reported.

    Args:
        trainer: verl's ``PPOTrainer``. batch: its ``KVBatchMeta``, balanced over the ranks.

    Returns:
        Metrics of the checked sequences, and the numbers of these sequences and of their tokens.

    Raises:
        LogProbsDiffer: a token differs in a bit.
    """
    import transfer_queue
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import response_from_nested

    config = trainer.config.actor_rollout_ref
    workers = trainer.actor_rollout_wg
    real = [not tag.get("is_padding", False) for tag in batch.tags]
    ranks = workers.world_size
    a_rank = min(rows_per_rank(config.rollout), len(real) // ranks)
    rows = rows_to_check(real, a_rank * ranks, trainer.global_steps)
    keys = [batch.keys[row] for row in rows]

    # Fetched, since results stored by key would be fields that other sequences lack.
    data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id)
    data = data.select(*(name for name, value in data.items() if isinstance(value, torch.Tensor)))
    stated, mask, responses = data["rollout_log_probs"], data["response_mask"], data["responses"]
    tensordict_utils.assign_non_tensor(
        data,
        calculate_entropy=True,
        compute_loss=False,
        temperature=config.rollout.temperature,
        micro_batch_size_per_gpu=a_rank,
    )
    outputs = workers.compute_log_prob(data)
    actor = response_from_nested(outputs["log_probs"], mask)
    entropy = response_from_nested(outputs["entropy"], mask)

    difference = first_difference(stated, actor, mask)
    if difference is not None:
        token_ids = responses.values()[responses.offsets()[difference.row] :]
        raise LogProbsDiffer(_message(difference, trainer.global_steps, keys, rows, int(token_ids[difference.token])))
    return _metrics(config.actor, stated, actor, entropy, mask, responses)


def _message(first: Difference, step: int, keys: list[str], rows: list[int], token_id: int) -> str:
    return (
        f"jetrl.old_log_probs=rollout: in step {step} the log-probability of response token {first.token} (id "
        f"{token_id}) of sequence {keys[first.row]}, position {rows[first.row]} of the batch, is "
        f"{_shown(first.rollout)} in the rollout and {_shown(first.actor)} in the actor's forward; {first.count} of "
        f"{first.checked} checked tokens differ, so trainer and rollout are different policies. "
        "Set jetrl.old_log_probs=compute, and run `jetrl diff` to find the operation that differs."
    )


def _shown(value: float) -> str:
    bits = torch.tensor(value, dtype=torch.float32).view(torch.int32).item() & 0xFFFFFFFF
    return f"{value:.9g} ({bits:#010x})"


def _metrics(
    actor_config: Any,
    rollout: torch.Tensor,
    actor: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    responses: torch.Tensor,
) -> dict[str, float]:
    """verl's metrics of a whole batch's forward, for these sequences, by verl's own functions."""
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
    from verl.utils.debug import metrics as debug

    tokens = int(mask.values().bool().sum())
    metrics = {
        "training/old_log_probs_checked_sequences": len(mask.offsets()) - 1,
        "training/old_log_probs_checked_tokens": tokens,
    }
    if not tokens:
        return metrics
    jagged = {
        "rollout_log_probs": rollout,
        "old_log_probs": actor,
        "entropy": entropy,
        "response_mask": mask,
        "responses": responses,
    }
    padded = TensorDict(jagged, batch_size=len(mask.offsets()) - 1).to_padded_tensor()
    by_sequence = agg_loss(
        loss_mat=padded["entropy"],
        loss_mask=padded["response_mask"],
        loss_agg_mode=actor_config.loss_agg_mode,
        loss_scale_factor=actor_config.loss_scale_factor,
    )
    metrics["actor/entropy"] = by_sequence.item()
    metrics |= compute_rollout_corr_metrics_from_logprobs(
        padded["old_log_probs"], padded["rollout_log_probs"], padded["response_mask"]
    )
    return metrics | debug.calculate_debug_metrics(DataProto(batch=padded))


def install_in_trainer() -> None:
    """Check every batch of verl's trainer in the process that runs it; verl's bypass mode must be on."""
    run_after_old_log_probs("check of the rollout's log-probabilities", check)
