# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's log-probabilities are compared in all 32 bits with the rollout's before each update.

Compared are the tokens that the current weights sampled. Asynchronous trainers count the others by lag: the number of
weight syncs since the weights that sampled a token. Under ``jetrl.old_log_probs=compute`` verl has computed the
trainer's for the whole batch, so the comparison needs no forward. Under ``rollout`` verl's bypass mode skips that
forward: each step runs one micro-batch a rank through the actor, whose window moves with the global step, so that after
``ceil(sequences / window)`` steps every position has been checked, also across a resume; and ``train/tripwire.py``
compares the first update's own forward. Under ``precision=jet_fp8_exact`` a differing bit stops the run before the
update; under ``jet_fp8`` it warns once and is a metric.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from jetrl_verl.config.job import Job
from jetrl_verl.metrics.mismatch import by_lag, prefixed
from jetrl_verl.patches.batch_hooks import register_in_trainer
from jetrl_verl.patches.checkpoint_tracker import steps_in
from jetrl_verl.patches.token_versions import TOKEN_VERSIONS

POLICY = "stopped_policy"
"""Folder of a checkpoint that holds the policy in Hugging Face's format alone; see ``train/tripwire.py``."""

FORWARD_OPTIONS = ("scale_rule", "unfit_layers", "kv_cache")
"""Options of a run that change log-probabilities within ``precision=jet_fp8_exact``."""

_HOOK = "comparison with the rollout's log-probabilities"
_COUNTED = "training/old_log_probs"
_WARNED: list[str] = []


class LogProbsDiffer(RuntimeError):
    """The trainer's log-probability of a token differs from the rollout's.

    A worker raises it with a :class:`Difference` as its one argument, the process of verl's trainer with a sentence.
    """


@dataclass(frozen=True)
class Difference:
    """The first token whose bits differ, and its sequence; a stopped run saves it for ``jetrl diff --sequence``.

    Attributes:
        prompt, response: token ids. sampled: for each token of the response 1 if the policy sampled it, else 0.
        rollout, trainer: FP32 log-probabilities of the response. token: position in the response.
        differing, compared: numbers of tokens.
        step, temperature, options: of the run; options are :data:`FORWARD_OPTIONS`.
    """

    prompt: list[int]
    response: list[int]
    sampled: list[int]
    rollout: list[float]
    trainer: list[float]
    token: int
    differing: int
    compared: int
    step: int = 0
    temperature: float = 1.0
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        here = self.token
        return (
            f"the log-probability of response token {here} (id {self.response[here]}) is {_shown(self.rollout[here])} "
            f"in the rollout and {_shown(self.trainer[here])} in the trainer ({self.differing} of {self.compared} "
            "compared tokens differ)"
        )

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, file: Path) -> "Difference":
        """Raises ``OSError``, ``TypeError`` or ``ValueError`` for a file that :meth:`save` has not written."""
        difference = cls(**json.loads(file.read_text()))
        of_tokens = (difference.response, difference.sampled, difference.rollout, difference.trainer)
        if len(set(map(len, of_tokens))) != 1 or not 0 <= difference.token < len(difference.response):
            raise ValueError(f"{file} has no log-probabilities of a response")
        return difference


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


def compare(rollout: torch.Tensor, trainer: torch.Tensor, data: Any) -> tuple[int, Difference | None]:
    """Compare the bits of two sets of log-probabilities, so a NaN equals itself and 0 differs from -0.

    Args:
        rollout, trainer: FP32, jagged ``[sequences, tokens]``.
        data: jagged ``prompts``, ``responses`` and ``response_mask``, which is 0 on answers of tools and on padding.

    Returns:
        The number of compared tokens, and the first difference.

    Raises:
        ValueError: lengths differ, or a tensor is not FP32.
    """
    mask = data["response_mask"]
    offsets, sampled = mask.offsets(), mask.values().bool()
    for name, tensor in (("rollout", rollout), ("trainer", trainer)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"Expected log-probabilities of the {name} in float32, got {tensor.dtype}")
        if not torch.equal(tensor.offsets(), offsets):
            lengths = tensor.offsets().diff().tolist()
            raise ValueError(f"{lengths} log-probabilities of the {name} for {offsets.diff().tolist()} response tokens")
    places = ((rollout.values().view(torch.int32) != trainer.values().view(torch.int32)) & sampled).nonzero().flatten()
    compared = int(sampled.sum())
    if not len(places):
        return compared, None
    first = int(places[0])
    # Empty sequences before the token's share its offset.
    row = int(torch.searchsorted(offsets, first, right=True)) - 1
    tensors = (data["prompts"], data["responses"], mask, rollout, trainer)
    values = [tensor.values()[slice(*tensor.offsets()[row : row + 2].tolist())].tolist() for tensor in tensors]
    return compared, Difference(*values, first - int(offsets[row]), len(places), compared)


def rows_per_rank(rollout: Any) -> int:
    """Sequences of one micro-batch of the skipped forward, from verl's rollout config."""
    if rollout.log_prob_use_dynamic_bsz:
        longest = rollout.prompt_length + rollout.response_length
        return max(1, rollout.log_prob_max_token_len_per_gpu // longest)
    return rollout.log_prob_micro_batch_size_per_gpu or 1


def masked(mask: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """A jagged ``response_mask`` that is 0 also on tokens where ``kept``, ``[tokens]``, is."""
    return torch.nested.nested_tensor_from_jagged(mask.values() * kept, mask.offsets())


UNKNOWN = -1
"""Version of a token of which nothing says what sampled it."""


def versions_of(data: Any, tags: Sequence[dict], current: int) -> torch.Tensor:
    """The version of the weights that sampled each token of the responses.

    Args:
        data: jagged ``prompts`` and ``responses``, and for sequences of several versions ``extra_fields`` (see
            patches/token_versions.py). tags: of the sequences; they state the versions of the first and the last token.
        current: of sequences that state none.

    Returns:
        int64 ``[tokens]``, in the order of the sequences; :data:`UNKNOWN` where nothing says it.
    """
    versions = []
    lengths = (data[name].offsets().diff().tolist() for name in ("prompts", "responses"))
    for row, (tag, prompt, response) in enumerate(zip(tags, *lengths, strict=True)):
        oldest, newest = tag.get("min_global_steps"), tag.get("max_global_steps")
        if oldest == newest:
            versions.append(torch.full((response,), current if oldest is None else oldest))
            continue
        of_row = torch.full((response,), UNKNOWN)
        stated = data["extra_fields"][row] if "extra_fields" in data else {}
        for first, count, version in stated.get(TOKEN_VERSIONS) or ():
            of_row[max(0, first - prompt) : first - prompt + count] = version
        versions.append(of_row)
    return torch.cat(versions)


def _holds_sampled_version(trainer: Any) -> bool:
    """Whether old log-probabilities are those of the weights that were sent at the end of the last step.

    verl's trainer of step n sent them as version n - 1. It holds them until its first update of the step; under
    ``separate_async`` it restores them for the old log-probabilities of every later batch, but not in bypass mode.
    """
    first = getattr(trainer, "local_trigger_step", 0) == 0
    return first or (_mode(trainer) == "separate_async" and not _bypasses(trainer))


def _bypasses(trainer: Any) -> bool:
    return bool((trainer.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False))


def _mode(trainer: Any) -> str:
    return getattr(trainer, "trainer_mode", "sync")


@dataclass(frozen=True)
class Tripwire:
    """The comparison of a job in the process of verl's trainer."""

    job: Job

    def after_old_log_probs(self, trainer: Any, batch: Any) -> dict[str, float]:
        """Compare a batch's log-probabilities before anything uses them.

        Args:
            trainer: verl's ``PPOTrainer``. batch: its ``KVBatchMeta``, balanced over the ranks.

        Returns:
            Metrics: how many sequences and tokens were compared, how many tokens differ; of a micro-batch verl's too.

        Raises:
            LogProbsDiffer: a token differs in a bit under ``precision=jet_fp8_exact``.
        """
        if self.job.options.old_log_probs == "rollout":
            if not _holds_sampled_version(trainer):
                return {}
            data, trained, metrics = _micro_batch(trainer, batch)
        else:
            data, metrics = _computed(trainer, batch, every_token=self.job.exact and _mode(trainer) == "sync")
            if data is None:
                return metrics
            trained = data["old_log_probs"]
        if self.job.images:
            data, counts = _text_of(data, trained, _placeholders(trainer.processor))
            metrics |= counts
        if self.job.options.old_log_probs == "compute":
            sequences = sum(bool(mask.any()) for mask in data["response_mask"].unbind())
        else:
            sequences = len(trained.offsets()) - 1 - metrics.get(f"{_COUNTED}_image_sequences", 0)
        compared, difference = compare(data["rollout_log_probs"], trained, data)
        if difference is not None:
            if self.job.exact:
                self.stop(trainer, difference)
            elif not _WARNED:
                _WARNED.append(str(difference))
                remedy = "Set precision=jet_fp8_exact to stop at the first, with a jetrl diff command that explains it."
                if not self.job.bit_equal:  # which jet_fp8_exact would refuse
                    remedy = "The first lines of the run say why, and what to set."
                print(
                    f"jetrl_verl: warning: in step {trainer.global_steps}, {difference}, so the run is not exact; "
                    f"{_COUNTED}_differing_tokens counts them in every step. {remedy}",
                    file=sys.stderr,
                    flush=True,
                )
        return metrics | {
            f"{_COUNTED}_checked_sequences": sequences,
            f"{_COUNTED}_checked_tokens": compared,
            f"{_COUNTED}_differing_tokens": 0 if difference is None else difference.differing,
        }

    def after_failed_update(self, trainer: Any, error: Exception) -> None:
        """Stop where every rank of the actor has raised :class:`LogProbsDiffer` before its first update."""
        cause = getattr(error, "cause", error)  # Ray's error of a remote call holds the worker's
        if isinstance(cause, LogProbsDiffer):
            self.stop(trainer, *cause.args)

    def stop(self, trainer: Any, difference: Difference) -> NoReturn:
        """Save the sequence and the policy, and raise :class:`LogProbsDiffer` with the command that explains them."""
        config, options = trainer.config, {name: getattr(self.job.options, name) for name in FORWARD_OPTIONS}
        checkpoints = Path(config.trainer.default_local_dir).absolute()
        folder = checkpoints / f"log_probs_differ_in_step_{trainer.global_steps}"
        sequence, policy = folder / "sequence.json", folder / POLICY / "huggingface"
        temperature = config.actor_rollout_ref.rollout.temperature
        saved = replace(difference, step=trainer.global_steps, temperature=temperature, options=options)
        unsaved = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            saved.save(sequence)
            # Every rank takes part, since FSDP gathers the weights.
            trainer.actor_rollout_wg.save_checkpoint(str(folder / POLICY), None, trainer.global_steps, None)
        except Exception as error:  # the difference is what has to be said
            unsaved = f", which failed to be saved: {error}"
        command = ["jetrl", "diff", str(policy), "--sequence", str(sequence), "--out", str(folder / "diff")]
        latest = max(steps_in(checkpoints), default=None)
        resume = "" if latest is None else f"its checkpoint of step {latest} (trainer.resume_mode=auto), or from "
        raise LogProbsDiffer(
            f"precision=jet_fp8_exact: before the update of step {trainer.global_steps}, {difference}, so the two are "
            f"different policies and the run stops; find the operation with `{shlex.join(command)}`, or go on with "
            f"precision=jet_fp8 from {resume}the saved weights (actor_rollout_ref.model.path={policy}{unsaved})."
        ) from None


def _placeholders(processor: Any) -> list[int]:
    """The tokens that stand for an image or a video, which no response samples."""
    from verl.workers.rollout.utils import get_vision_placeholder_token_ids

    return get_vision_placeholder_token_ids(processor)


def _text_of(data: Any, trained: torch.Tensor, placeholders: list[int]) -> tuple[dict[str, Any], dict[str, float]]:
    """The data with the mask of sequences without an image, and how the others differ, which have their own tower on
    each side."""
    mask, tokens = data["response_mask"], torch.tensor(placeholders)
    sequences = zip(*(data[name].unbind() for name in ("prompts", "responses")), strict=True)
    has_image = torch.tensor([bool(torch.isin(torch.cat(both), tokens).any()) for both in sequences])
    of_tokens = has_image.repeat_interleave(mask.offsets().diff())
    fields = {name: data[name] for name in ("prompts", "responses", "rollout_log_probs")}

    images, text = (fields | {"response_mask": masked(mask, kept)} for kept in (of_tokens, ~of_tokens))
    compared, difference = compare(data["rollout_log_probs"], trained, images)
    return text, {
        f"{_COUNTED}_image_sequences": int(has_image.sum()),
        f"{_COUNTED}_image_tokens": compared,
        f"{_COUNTED}_differing_image_tokens": 0 if difference is None else difference.differing,
    }


def _computed(trainer: Any, batch: Any, every_token: bool) -> tuple[Any | None, dict[str, float]]:
    """Both log-probabilities of the sequences, and metrics by lag; None if nothing can be compared.

    ``response_mask`` is 0 on tokens that other weights sampled, too. ``every_token`` keeps those: an exact run under
    ``sync`` compares all, since its support refuses what would make an older policy sample some.
    """
    import transfer_queue

    stated = trainer.config.actor_rollout_ref.rollout.calculate_log_probs and not _bypasses(trainer)
    sequences = [
        (key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)
    ]
    if not (stated and sequences and (every_token or _holds_sampled_version(trainer))):
        return None, {}
    keys, tags = zip(*sequences, strict=True)
    fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs"]
    if _mode(trainer) != "sync":
        fields.append("extra_fields")
    data = transfer_queue.kv_batch_get(keys=list(keys), partition_id=batch.partition_id, select_fields=fields)
    if every_token:
        return data, {}
    metrics = _keep_current(trainer, data, data["old_log_probs"], tags)
    return data, metrics if _mode(trainer) != "sync" else {}


def _keep_current(trainer: Any, data: Any, trained: torch.Tensor, tags: Sequence[dict]) -> dict[str, float]:
    """Metrics by lag; afterwards ``response_mask`` is 0 on tokens that other weights than the current ones sampled."""
    mask, current = data["response_mask"], trainer.global_steps - 1
    lags = current - versions_of(data, tags, current)
    metrics = by_lag(trained.values(), data["rollout_log_probs"].values(), mask.values(), lags, current - UNKNOWN)
    data["response_mask"] = masked(mask, lags == 0)
    return prefixed("rollout_corr", metrics)


SAMPLED_NOW = "jetrl_sampled_now"
"""Field of the sequences of an asynchronous trainer whose first update is compared: 1 on tokens of its weights."""


def _state_sampled_now(trainer: Any, batch: Any) -> list[bool]:
    """Write :data:`SAMPLED_NOW` of a batch for the actor; whether each sequence has such a token."""
    import transfer_queue
    from tensordict import TensorDict

    where = dict(keys=batch.keys, partition_id=batch.partition_id)
    data = transfer_queue.kv_batch_get(**where, select_fields=["prompts", "responses", "extra_fields"])
    current = trainer.global_steps - 1
    sampled = (versions_of(data, batch.tags, current) == current).long()
    sampled = torch.nested.nested_tensor_from_jagged(sampled, data["responses"].offsets())
    transfer_queue.kv_batch_put(**where, fields=TensorDict({SAMPLED_NOW: sampled}, batch_size=len(batch.keys)))
    return [bool(row.any()) for row in sampled.unbind()]


def _micro_batch(trainer: Any, batch: Any) -> tuple[Any, torch.Tensor, dict[str, float]]:
    """One micro-batch a rank, the actor's log-probabilities of its responses, and verl's metrics of both."""
    import transfer_queue
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import response_from_nested

    config = trainer.config.actor_rollout_ref
    workers = trainer.actor_rollout_wg
    real = [not tag.get("is_padding", False) for tag in batch.tags]
    ranks = workers.world_size
    a_rank = min(rows_per_rank(config.rollout), len(real) // ranks)
    if _mode(trainer) != "sync":
        real = list(map(all, zip(real, _state_sampled_now(trainer, batch), strict=True)))
    rows = rows_to_check(real, a_rank * ranks, trainer.global_steps)

    # Fetched, since results stored by key would be fields that other sequences lack.
    whole = transfer_queue.kv_batch_get(keys=[batch.keys[row] for row in rows], partition_id=batch.partition_id)
    kept = [name for name, value in whole.items() if isinstance(value, torch.Tensor) or name == "multi_modal_inputs"]
    data = whole.select(*kept)
    fields = {name: data[name] for name in ("rollout_log_probs", "response_mask", "responses")}
    tensordict_utils.assign_non_tensor(
        data,
        calculate_entropy=True,
        compute_loss=False,
        temperature=config.rollout.temperature,
        micro_batch_size_per_gpu=a_rank,
    )
    outputs = workers.compute_log_prob(data)
    for name, output in (("old_log_probs", "log_probs"), ("entropy", "entropy")):
        fields[name] = response_from_nested(outputs[output], data["response_mask"])
    metrics = _metrics(config.actor, fields)
    if _mode(trainer) != "sync":
        metrics |= _keep_current(trainer, whole, fields["old_log_probs"], [batch.tags[row] for row in rows])
    return whole, fields["old_log_probs"], metrics


def _metrics(actor_config: Any, fields: dict[str, torch.Tensor]) -> dict[str, float]:
    """verl's metrics of a whole batch's forward, for these sequences, by its own functions; empty without a token."""
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
    from verl.utils.debug import metrics as debug

    if not fields["response_mask"].values().any():
        return {}
    padded = TensorDict(fields, batch_size=len(fields["response_mask"].offsets()) - 1).to_padded_tensor()
    by_sequence = agg_loss(
        loss_mat=padded["entropy"],
        loss_mask=padded["response_mask"],
        loss_agg_mode=actor_config.loss_agg_mode,
        loss_scale_factor=actor_config.loss_scale_factor,
    )
    metrics = compute_rollout_corr_metrics_from_logprobs(
        padded["old_log_probs"], padded["rollout_log_probs"], padded["response_mask"]
    )
    return {"actor/entropy": by_sequence.item()} | metrics | debug.calculate_debug_metrics(DataProto(batch=padded))


def _shown(value: float) -> str:
    bits = torch.tensor(value, dtype=torch.float32).view(torch.int32).item() & 0xFFFFFFFF
    return f"{value:.9g} ({bits:#010x})"


def count_by_lag(trainer: Any, batch: Any) -> dict[str, float]:
    """Metrics by lag of an asynchronous trainer whose tokens are not compared."""
    return {} if _mode(trainer) == "sync" else _computed(trainer, batch, every_token=False)[1]


def install_counts_in_trainer() -> None:
    """Count the tokens of an asynchronous trainer by lag in the process that runs it."""
    register_in_trainer("AFTER_OLD_LOG_PROBS", _HOOK, count_by_lag)


def install_in_trainer(job: Job) -> None:
    """Compare every batch of verl's trainer in the process that runs it."""
    tripwire = Tripwire(job)
    register_in_trainer("AFTER_OLD_LOG_PROBS", _HOOK, tripwire.after_old_log_probs)
    if job.options.old_log_probs == "rollout":
        register_in_trainer("AFTER_FAILED_UPDATES", _HOOK, tripwire.after_failed_update)
