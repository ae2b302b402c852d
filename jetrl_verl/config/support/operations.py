# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the composed configuration that the shared operations cannot do, those that only equality in every bit
excludes, the two classes of docs/architecture.md, "Zero mismatch", and those that the start of a run names.
"""

from functools import partial

from jetrl_verl.formats.catalog import TRAINED, UNQUANTIZED

from .row import NOT_EMPTY, NOT_FALSE, NOT_TRUE, SET, TRUE, Get, Row, Scope, Values, above, one_of, other_than
from .scopes import ACTOR, ADAPTERS, EXACT, MODEL, ROLLOUT, VLLM, shared_row

_PROCESSED = other_than("processed_logprobs")
_NO_POLICY = Values("0 or below", lambda value: value is not None and float(value) <= 0, "1")

SHARED_ROWS: dict[str, Row] = {
    # Modules of the trainer's model, or its whole forward, that other code replaces.
    "liger": shared_row("Liger kernels", "Liger kernels replace norms and MLPs", {f"{MODEL}.use_liger": NOT_FALSE}),
    "tiled_mlp": shared_row("tiled MLPs", "tiled MLPs replace the MLPs", {f"{MODEL}.tiled_mlp.enabled": NOT_FALSE}),
    "distillation": shared_row(
        "distillation", "it needs other outputs of the model", {"distillation.enabled": NOT_FALSE}
    ),
    # Kernels that are not the one both sides call.
    "attention_backend": shared_row(
        "attention backends other than FlashAttention 3",
        "both sides call FlashAttention 3 without splits",
        {f"{VLLM}.attention_backend": other_than("FLASH_ATTN", "flash_attn"), f"{VLLM}.attention_config": NOT_EMPTY},
    ),
    "context_parallel": shared_row(
        "context parallel rollout",
        "it splits the attention",
        {f"{VLLM}.{phase}_context_parallel_size": other_than(1) for phase in ("decode", "prefill")},
    ),
    "model_impl": shared_row(
        "vLLM's Transformers backend", "its modules are not vLLM's", {f"{VLLM}.model_impl": other_than("auto", "vllm")}
    ),
    # The shared log-probability is that of the whole softmax at the sampling temperature. Under these the rollout
    # samples from, or reports, another distribution, and importance weights would be wrong without a word.
    "truncated_sampling": shared_row(
        "nucleus sampling (top_p) and top_k in training",
        "the trainer's softmax is whole",
        {f"{ROLLOUT}.top_p": other_than(1), f"{ROLLOUT}.top_k": other_than(-1)},
    ),
    "repetition_penalty": shared_row(
        "penalties in training", "the trainer's logits carry none", {f"{ROLLOUT}.repetition_penalty": other_than(1)}
    ),
    "logprobs_mode": shared_row(
        "raw log-probabilities",
        "raw log-probabilities are not of the sampling distribution",
        {f"{ROLLOUT}.logprobs_mode": _PROCESSED, f"{VLLM}.logprobs_mode": _PROCESSED},
    ),
    "logits_processors": shared_row(
        "logits processors", "the trainer runs none", {f"{VLLM}.logits_processors": other_than([])}
    ),
    "worker_cls": shared_row(
        "a vLLM worker of your own", "the worker runs the operations", {f"{VLLM}.worker_cls": other_than("auto")}
    ),
    "temperature": shared_row(
        "a temperature of 0 in training", "there is no distribution", {f"{ROLLOUT}.temperature": _NO_POLICY}
    ),
}

_exact = partial(Row, scope=EXACT)

EXACT_ROWS: dict[str, Row] = {
    "exact_log_probs": _exact(
        "a rollout without log-probabilities",
        "its log-probabilities are what is compared",
        {f"{ROLLOUT}.calculate_log_probs": NOT_TRUE},
        loses="nothing compares the two sides",
    ),
    "exact_agent_loops": _exact(
        "agent loops of your own",
        "a request with its own top_p or temperature has log-probabilities that the trainer does not compute",
        {
            f"{ROLLOUT}.agent.agent_loop_config_path": SET,
            f"{ROLLOUT}.agent.agent_loop_manager_class": SET,
            f"{ROLLOUT}.agent.default_agent_loop": other_than("single_turn_agent", "tool_agent"),
        },
        loses="k3_kl may be above 0",
    ),
    "exact_kept_rollouts": _exact(
        "rollouts read from a folder",
        "another policy sampled them",
        {f"skip.{name}.enable": TRUE for name in ("rollout", "rollout_tq", "async_rollout")},
    ),
    "exact_several_batches": _exact(
        "several batches per weight sync",
        "all but the first were sampled before an update",
        {"trainer.v1.sync.parameter_sync_step": other_than(1)},
    ),
}


def _in_fp8(get: Get) -> bool:
    return get("jetrl.train") in TRAINED


def _several_batches(get: Get) -> bool:
    """Whether a batch of rollouts is several mini-batches; calibrated bounds make up for what their ratios carry."""
    sizes = get(f"{ACTOR}.ppo_mini_batch_size"), get("data.train_batch_size")
    return _in_fp8(get) and get("jetrl.clip") == "fixed" and None not in sizes and sizes[0] < sizes[1]


def _divergence(get: Get) -> bool:
    # The reference of adapters is the actor without them.
    apart = _in_fp8(get) and not ADAPTERS.applies(get)
    return apart and bool(get(f"{ACTOR}.use_kl_loss") or get("algorithm.use_kl_in_reward"))


_RATIOS = "the ratios of later updates carry FP8's rounding"
_MANY = "If many tokens are clipped, set clip=calibrated, or "

NOTE_ROWS: dict[str, Row] = {
    "several_mini_batches": Row(
        "several mini-batches per batch of rollouts",
        "weights move between the updates of a step",
        {f"{ACTOR}.ppo_mini_batch_size": Values("below `data.train_batch_size`", lambda value: True, "")},
        scope=Scope("", _several_batches),
        instead=f"{_MANY}{ACTOR}.ppo_mini_batch_size to data.train_batch_size",
        loses=_RATIOS,
    ),
    "several_epochs": Row(
        "several epochs per batch of rollouts",
        "weights move between the updates of a step",
        {f"{ACTOR}.ppo_epochs": above(1)},
        scope=Scope("", lambda get: _in_fp8(get) and get("jetrl.clip") == "fixed"),
        instead=f"{_MANY}{ACTOR}.ppo_epochs=1",
        loses=_RATIOS,
    ),
    "bf16_reference": Row(
        "a BF16 reference policy of FP8 training with a KL term",
        "the actor runs in FP8",
        {"jetrl.ref": one_of(UNQUANTIZED, use=TRAINED[0])},
        scope=Scope("", _divergence),
        loses="the KL term carries FP8's rounding",
    ),
}
"""Neither refused nor a difference of the sampled tokens' log-probabilities; the start of a run names them."""
