# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes on one GPU, term by term. P: parameters, S: GPUs that FSDP shards over, T: tokens of a micro-batch, L: layers,
V, H: vocabulary and hidden size."""

import math
from dataclasses import replace
from typing import NamedTuple

from jetrl_verl.config.support.row import Get
from jetrl_verl.config.support.scopes import ACTOR, MODEL, REF, ROLLOUT, SEPARATE
from jetrl_verl.formats.catalog import FLOW, FORMATS, UNQUANTIZED
from jetrl_verl.inputs import UserError
from jetrl_verl.nn.checkpointing import MARGIN
from jetrl_verl.nn.chunked_logits import CHUNK_BYTES, KEPT_BYTES
from jetrl_verl.reference import BLOCK
from jetrl_verl.reference.experts import rows_of_segments
from jetrl_verl.tools.memory.shapes import BF16, FP32, Model

GIB = 2**30

CONTEXTS = 3.7 * GIB
"""CUDA contexts of trainer and rollout, NCCL, CUDA graphs: memory in use less what is counted, of 8B at TP 4."""

MOMENTS_8BIT = 0.255
"""AdamW's moments in 8 bits, with their scales, over those in FP32."""

Terms = dict[str, float]
"""Name of what a GPU holds -> bytes."""


def state(model: Model, shards: int, eight_bit: bool = False, rank: int = 0) -> Terms:
    """What the trainer keeps from step to step: FP32 weights, ``4 P / S``, and AdamW's two moments, ``8 P / S``; with
    LoRA of that ``rank`` moments of the adapters alone, and of a frozen tower none."""
    weights, moments = FP32 * (model.parameters + model.tower) / shards, 2 * _trained(model, shards, rank)
    weights += FP32 * rank * model.edges / shards
    return {"FP32 weights": weights, "optimizer moments": moments * (MOMENTS_8BIT if eight_bit else 1)}


def _trained(model: Model, shards: int, rank: int) -> float:
    """FP32 bytes of what is trained: all, or adapters of all linear layers."""
    return FP32 * (rank * model.edges if rank else model.parameters) / shards


def update(
    model: Model,
    shards: int,
    tokens: float,
    *,
    checkpointing: bool = True,
    eight_bit: bool = False,
    shared: bool = False,
    kept: float = 0.0,
    results: float = 0.0,
    rank: int = 0,
) -> Terms:
    """Peak of an update, of a backward pass or of the optimizer step.

    Both have the state and FP32 gradients, ``4 P / S``. Backward adds activations (with checkpointing the BF16 inputs
    of the layers, ``2 H L T``), gathered weights and the larger of logits and one layer's expert rows, which do not
    live at the same time; the optimizer step adds ``4 P / S``. P is what is trained, see :func:`state` for ``rank``.
    ``shared``: shared operations. ``kept``: :func:`kept_weights`, or 0 where FSDP gathers layer by layer. ``results``:
    what layers keep of :func:`layer_results`.
    """
    shard = _trained(model, shards, rank)
    logits, rows = update_logits(model, tokens, shared), expert_rows(model, tokens)
    # One layer of a mixture: gradients in BF16 and FP32, FP8 copies both ways.
    experts = (BF16 + FP32 + 2) * model.layer if model.experts else 0.0
    backward = {
        "activations": model.layers * tokens * (BF16 * model.hidden if checkpointing else layer_activations(model))
        + results,
        "gathered weights": (kept or gathered(model, shards)) + experts,
        "logits" if logits >= rows else "expert rows": max(logits, rows),
    }
    optimizer = {"optimizer step": shard}
    peak = max(backward, optimizer, key=lambda terms: sum(terms.values()))
    return {**state(model, shards, eight_bit, rank), "gradients": shard, **peak}


def old_log_probs(model: Model, shards: int, tokens: float, *, shared: bool = False, kept: float = 0.0) -> Terms:
    """A forward pass, next to the state. Logits: ``6 V T``, in BF16 and FP32; of shared operations one FP32 chunk."""
    logits = model.vocabulary * tokens
    return {
        "activations": layer_activations(model) * tokens,
        "gathered weights": kept or gathered(model, shards),
        "logits": min(FP32 * logits, CHUNK_BYTES) if shared else (BF16 + FP32) * logits,
    }


def layer_activations(model: Model) -> float:
    """Of one token in one layer, BF16: inputs of the linears and two norms, 5 H, ``mixing``, which for attention is q,
    k, v and the output, and gate, up and their product, 3 inner."""
    return BF16 * (5 * model.hidden + model.mixing + 3 * model.inner)


def layer_results(model: Model, tokens: float) -> float:
    """What all layers keep under ``jetrl.checkpointing=selective`` next to their inputs. Experts: gate and up in BF16,
    their product in FP8 with scales (nn/experts.py)."""
    of_experts = 0.0
    if model.experts:
        of_experts = _rows(model, tokens) * model.expert_width * (2 * BF16 + 1 + FP32 / BLOCK)
    return tokens * model.results + model.layers * of_experts


def update_logits(model: Model, tokens: float, shared: bool) -> float:
    """Stock operations: ``8 V T``, logits in BF16, their FP32 softmax, their gradient in BF16. Shared operations:
    ``2 V T``, the gradient, and at most 4 GiB of kept and 1 GiB of current FP32 logits (nn/chunked_logits.py)."""
    logits = model.vocabulary * tokens
    if not shared:
        return (BF16 + FP32 + BF16) * logits
    return BF16 * logits + min(FP32 * logits, KEPT_BYTES) + min(FP32 * logits, CHUNK_BYTES)


def gathered(model: Model, shards: int) -> float:
    """What FSDP gathers, BF16: a layer, the next one and lm_head; nothing on one GPU. A dense layer's FP8 copies are
    below the error of the whole, 1 to 3%."""
    return BF16 * (2 * model.layer + model.head) if shards > 1 else 0.0


def kept_weights(model: Model, kind: str, quantized_backward: bool = True) -> float:
    """Under ``jetrl.gathered=batch``: ``2 P``; in a format the qdata of each quantized parameter, and those of the
    transposed copy that its DGrad reads. Experts keep no transposed copy. ``kind`` is a value of ``jetrl.train``."""
    if kind == UNQUANTIZED:
        return BF16 * model.parameters
    copies = 1 + (quantized_backward and not model.experts)
    return BF16 * model.parameters + copies * FORMATS[kind].element_bytes * model.quantized


def _rows(model: Model, tokens: float) -> int:
    """Rows of a layer's experts: one for each expert of a token, segments padded to 128."""
    return rows_of_segments(int(tokens * model.experts_per_token), model.experts, BLOCK)


def expert_rows(model: Model, tokens: float) -> float:
    """Backward of one layer of a mixture (nn/experts.py), for each row: dX and two FP8 copies of X; gate, up and their
    gradients in BF16 and FP8, and an FP8 product."""
    if not model.experts:
        return 0.0
    return _rows(model, tokens) * (model.hidden * (BF16 + 2) + model.expert_width * (2 * (2 * BF16 + 2) + 1))


def rollout_weights(model: Model, kind: str) -> float:
    """Of a whole replica: ``2 P``, or the qdata of each quantized parameter. Scales are under a thousandth; ``kind`` is
    a value of ``jetrl.rollout``."""
    saved = 0 if kind == UNQUANTIZED else BF16 - FORMATS[kind].element_bytes
    return BF16 * model.parameters - saved * model.quantized


def rollout(model: Model, kind: str, share: float, max_seqs: int, batched_tokens: int, tp: int) -> Terms:
    """What vLLM makes of its share of the GPU: weights, work space, and the rest for the KV cache.

    ``share`` is ``gpu_memory_utilization`` times the GPU's memory. Work space: FP32 logits of ``max_num_seqs`` requests
    twice, ``8 V`` each, and BF16 activations of ``max_num_batched_tokens``, ``2 (3 inner + 4 H) / TP`` each.
    """
    weights = rollout_weights(model, kind) / tp
    work = 2 * FP32 * model.vocabulary * max_seqs
    work += BF16 * batched_tokens * (3 * model.inner + 4 * model.hidden) / tp
    return {"vLLM weights": weights, "vLLM work space": work, "KV cache": max(0.0, share - weights - work)}


def weight_sync(model: Model, kind: str, tp: int, bucket: float, stock: bool) -> Terms:
    """The rollout's weights without a cache, verl's bucket, and the largest piece that is gathered at once: lm_head in
    FP32 and BF16, ``6 V H``, by stock verl; lm_head or a layer in BF16 by this package."""
    piece = (FP32 + BF16) * model.head if stock else BF16 * max(model.head, model.layer)
    return {"vLLM weights": rollout_weights(model, kind) / tp, "gathered weights": piece, "sync bucket": bucket}


class Precision(NamedTuple):
    """What memory depends on: formats of the rollout's and of the trainer's linears, shared operations."""

    name: str
    rollout: str
    train: str = UNQUANTIZED
    shared: bool = False


PRECISIONS = (
    Precision("bf16", UNQUANTIZED),
    Precision("bf16_shared", UNQUANTIZED, shared=True),
    Precision("fp8_rollout", FLOW),
    Precision("int8_rollout", "int8"),
    Precision("jet_fp8", FLOW, train=FLOW, shared=True),
)
"""The others hold the same: ``*_tis`` and ``qurl_*`` as their rollout, ``jet_fp8_exact`` as ``jet_fp8``."""


_COUNTS = (
    *("trainer.n_gpus_per_node", "trainer.nnodes", "data.train_batch_size"),
    *("data.max_prompt_length", "data.max_response_length", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    *(f"{ROLLOUT}.{name}" for name in ("n", "tensor_model_parallel_size", "max_num_seqs")),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
)
_OPTIONAL_COUNTS = (
    *(f"{ACTOR}.fsdp_config.fsdp_size", f"{ACTOR}.ulysses_sequence_parallel_size"),
    *(f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    *(f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
)
"""null, or -1, stands for verl's own choice."""
_COUNTS_OF_ITS_OWN = (f"{ROLLOUT}.n_gpus_per_node", f"{ROLLOUT}.nnodes")

_SIZES = (f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes")


def check_numbers(get: Get) -> None:
    """Raise ``UserError`` for a setting of a job that is read here and is not a number above 0."""
    for key in (*_COUNTS, *_OPTIONAL_COUNTS, *_SIZES, *(_COUNTS_OF_ITS_OWN if SEPARATE.applies(get) else ())):
        value = get(key)
        if key in _OPTIONAL_COUNTS and value in (None, -1):
            continue
        if not isinstance(value, (int, float) if key in _SIZES else int) or not 0 < value < math.inf:
            what = "number" if key in _SIZES else "whole number"
            raise UserError(f"{key}={value} is no {what} above 0, so nothing can be counted with it. Set one.")


def gpus_of(get: Get) -> int:
    """The trainer's GPUs, which the rollout shares unless it has its own alone."""
    return int(get("trainer.n_gpus_per_node")) * int(get("trainer.nnodes"))


def rollout_gpus_of(get: Get) -> int:
    """GPUs of the rollout's own."""
    return math.prod(int(get(key)) for key in _COUNTS_OF_ITS_OWN) if SEPARATE.applies(get) else 0


def longest_of(get: Get) -> int:
    """Tokens of the longest prompt and response together."""
    return int(get("data.max_prompt_length")) + int(get("data.max_response_length"))


def phases_of(get: Get, model: Model, precision: Precision, gib: float, stock: bool = False) -> dict[str, Terms]:
    """Phase -> what a GPU holds at its peak.

    The trainer's state stays between updates unless it is offloaded; an update has all of it, old log-probabilities
    have the weights. A reference policy that is not offloaded has FP32 weights. The rollout frees its memory for the
    trainer unless ``free_cache_engine=false``. With ``separate_async`` and ``hybrid_engine=false`` it has other GPUs:
    ``rollout`` is of these, ``sync`` of those that hold more. ``gib``: memory of a GPU. ``stock``: no operations are
    shared.
    """
    gpus, tp = gpus_of(get), int(get(f"{ROLLOUT}.tensor_model_parallel_size"))
    shards = int(get(f"{ACTOR}.fsdp_config.fsdp_size") or -1)
    shards = min(shards, gpus) if shards > 0 else gpus
    stock_verl = precision.name == "bf16"
    if stock_verl:  # which trains a tower, and has it in the rollout
        model = replace(model, linears=model.linears + model.tower, tower=0)
    kept = 0.0
    if get("jetrl.gathered") == "batch" and not stock_verl:
        kept = kept_weights(model, precision.train, get("jetrl.backward") != UNQUANTIZED)
    passes = {"shared": precision.shared and not stock, "kept": kept}
    optimizer = f"{get(f'{ACTOR}.optim.optimizer')}{get(f'{ACTOR}.optim.optimizer_impl')}"
    eight_bit = "8bit" in optimizer.lower()
    checkpointing = bool(get(f"{MODEL}.enable_gradient_checkpointing"))
    update_tokens, log_prob_tokens = micro_batches(get)
    rank = int(get(f"{MODEL}.lora_rank") or 0)
    whole = state(model, shards, eight_bit, rank)
    always = {"CUDA contexts": CONTEXTS}
    uses_reference = get(f"{ACTOR}.use_kl_loss") or get("algorithm.use_kl_in_reward")
    if uses_reference and not rank and not get(f"{REF}.fsdp_config.param_offload"):
        always["reference policy"] = whole["FP32 weights"]
    stays = {
        "FP32 weights": not get(f"{ACTOR}.fsdp_config.param_offload"),
        "optimizer moments": not get(f"{ACTOR}.fsdp_config.optimizer_offload"),
    }
    waiting = always | {name: size for name, size in whole.items() if stays[name]}
    share = float(get(f"{ROLLOUT}.gpu_memory_utilization")) * gib * GIB
    sequences, tokens = int(get(f"{ROLLOUT}.max_num_seqs")), int(get(f"{ROLLOUT}.max_num_batched_tokens") or 8192)
    engine = rollout(model, precision.rollout, share, sequences, tokens, tp)
    is_apart = SEPARATE.applies(get) and not get("actor_rollout_ref.hybrid_engine")
    awake = {} if get(f"{ROLLOUT}.free_cache_engine") or is_apart else engine
    scoring = old_log_probs(model, shards, log_prob_tokens, **passes)
    passes |= {"checkpointing": checkpointing, "eight_bit": eight_bit, "rank": rank}
    training = update(model, shards, update_tokens, **passes)
    if checkpointing and passes["shared"] and not get(f"{MODEL}.enable_activation_offload"):
        results = layer_results(model, update_tokens)
        if get("jetrl.checkpointing") == "auto":
            full = sum((always | training | awake).values())
            results = min(results, max(0.0, (1 - MARGIN) * gib * GIB - full))
        if get("jetrl.checkpointing") != "full":
            training = update(model, shards, update_tokens, results=results, **passes)
    bucket = float(get(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes")) * 2**20
    sending = weight_sync(model, precision.rollout, tp, bucket, stock_verl)
    phases = {
        "rollout": waiting | engine,
        "old log-probs": waiting | {"FP32 weights": whole["FP32 weights"]} | scoring | awake,
        "update": always | training | awake,
        "sync": waiting | awake | sending,
    }
    if is_apart:
        contexts = {"CUDA contexts": CONTEXTS}
        piece = sending.pop("gathered weights")
        resident = {} if get(f"{ROLLOUT}.free_cache_engine") else engine
        of_rollout = contexts | resident | sending | {"arriving weights": 2 * piece}
        of_trainer = waiting | {"gathered weights": 2 * piece}
        phases |= {
            "rollout": contexts | engine,
            "sync": max(of_trainer, of_rollout, key=lambda terms: sum(terms.values())),
        }
    return phases


def micro_batches(get: Get) -> tuple[float, float]:
    """Tokens of the largest micro-batch of an update and of old log-probabilities, all sequences at their longest."""
    prompts = int(get("data.train_batch_size"))
    of_a_gpu = prompts * int(get(f"{ROLLOUT}.n")) * longest_of(get) / gpus_of(get)
    mini_batches = -(-prompts // int(get(f"{ACTOR}.ppo_mini_batch_size") or prompts))
    return (
        min(_micro_batch(get, f"{ACTOR}.ppo", f"{ACTOR}.use_dynamic_bsz"), of_a_gpu / mini_batches),
        min(_micro_batch(get, f"{ROLLOUT}.log_prob", f"{ROLLOUT}.log_prob_use_dynamic_bsz"), of_a_gpu),
    )


def _micro_batch(get: Get, prefix: str, dynamic: str) -> float:
    """By sequences, or by tokens, at least the longest sequence, which Ulysses divides over its ranks."""
    sequences = get(f"{prefix}_micro_batch_size_per_gpu")
    if sequences and not get(dynamic):
        return longest_of(get) * int(sequences)
    ranks = int(get(f"{ACTOR}.ulysses_sequence_parallel_size") or 1)
    return max(int(get(f"{prefix}_max_token_len_per_gpu")), longest_of(get) / ranks)
