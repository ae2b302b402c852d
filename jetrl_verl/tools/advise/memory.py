# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes on one GPU, counted: the trainer's state and its peak, the rollout's weights and how much cache is left."""

from dataclasses import dataclass

from jetrl_verl.formats.catalog import FLOW, UNQUANTIZED
from jetrl_verl.nn.chunked_logits import CHUNK_BYTES, KEPT_BYTES
from jetrl_verl.tools.advise.rollout import WEIGHT_BYTES
from jetrl_verl.tools.advise.shapes import BF16, Model
from jetrl_verl.tools.advise.trainer import Flow

GIB = 2**30

LOGIT_BYTES = 8
"""Of one logit at the peak of an update with stock operations: BF16, its FP32 softmax and its gradient."""

EIGHT_BIT = 0.255
"""Bytes of AdamW's moments in 8 bits over those in FP32 (docs/options.md)."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of the trainer on one GPU.

    Attributes:
        weights, gradients, moments: the FP32 shards. step: what the optimizer's step needs besides, a copy of it.
        checkpoints: inputs of the decoder layers, kept for backward. logits: of one micro-batch, with their gradient.
        gathered: two decoder layers and lm_head in BF16, or all that stays gathered; of a mixture also what one layer's
            experts have beside them in backward, gradients in BF16 and FP32 and, under FP8, qdata and their transpose.
        rows: of a mixture, what backward of one layer holds for each of a token's experts.
    """

    weights: float
    gradients: float
    moments: float
    step: float
    checkpoints: float
    logits: float
    gathered: float
    rows: float = 0.0

    @property
    def state(self) -> float:
        """What stays from step to step."""
        return self.weights + self.moments

    @property
    def peak(self) -> float:
        """Of an update: behind the last layer's forward, in the backward of a mixture's layer, or in the optimizer's
        step."""
        passing = self.checkpoints + max(self.logits, self.rows) + self.gathered
        return self.weights + self.gradients + self.moments + max(self.step, passing)


def trainer_memory(
    model: Model,
    shards: int,
    micro_tokens: float,
    *,
    checkpointing: bool = True,
    eight_bit: bool = False,
    shared: bool = False,
    held: float = 0.0,
) -> TrainerMemory:
    """Bytes of training.

    Args:
        shards: GPUs that FSDP shards over. micro_tokens: of a micro-batch. shared: whether operations are.
        held: what stays gathered (:func:`held_bytes`), where weights do.
    """
    shard = model.parameters / shards
    layer = model.in_layers / model.layers
    kept = BF16 * model.hidden if checkpointing else _activation_bytes(model)
    return TrainerMemory(
        weights=4 * shard,
        gradients=4 * shard,
        moments=8 * shard * (EIGHT_BIT if eight_bit else 1),
        step=4 * shard,
        checkpoints=kept * model.layers * micro_tokens,
        logits=_logits(model.vocabulary * micro_tokens, shared),
        gathered=(held or (BF16 * (2 * layer + model.head) if shards > 1 else 0.0)) + _beside_experts(model, layer),
        rows=_expert_rows(model, micro_tokens),
    )


def held_bytes(model: Model, flow: Flow) -> float:
    """Of weights that stay gathered (``jetrl.gathered=batch``): all in BF16, under FP8 also qdata, and their transposes
    where DGrad reads them; a mixture's experts keep none."""
    transposes = flow.backward == FLOW and model.experts is None
    qdata = model.quantized * (1 + transposes) if flow.linears == FLOW else 0
    return BF16 * model.parameters + qdata


def _logits(count: float, shared: bool) -> float:
    """With shared operations the gradient in BF16, what forward kept, and a chunk's gradient in FP32."""
    if not shared:
        return LOGIT_BYTES * count
    return BF16 * count + min(4 * count, KEPT_BYTES) + min(4 * count, CHUNK_BYTES)


def _beside_experts(model: Model, layer: float) -> float:
    """A dense layer's are within the error of the records (1 to 3%); a mixture's layer has 600M parameters at 30B."""
    return 0.0 if model.experts is None else layer * (BF16 + 4 + 2)


def _expert_rows(model: Model, tokens: float) -> float:
    """At most alive at once in ``nn/experts.py``: the terms of dX and X's copies of the hidden size, in BF16 and one
    byte; gate, up and their gradients in BF16 and one byte; the product in one byte. Segments are filled up to 128."""
    if (experts := model.experts) is None:
        return 0.0
    inner = model.inner / experts.per_token
    rows = tokens * experts.per_token + 127 * experts.count
    return rows * (model.hidden * (BF16 + 2) + inner * (2 * (2 * BF16 + 2) + 1))


def _activation_bytes(model: Model) -> float:
    """Of one token in one layer without checkpointing: inputs of the linears, q, k, v, gate, up and two norms."""
    return BF16 * (5 * model.hidden + 2 * (model.queries + model.keys) + 3 * model.inner)


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes of one GPU of the rollout.

    Attributes:
        weights: in the precision's format. work: logits in FP32, twice, and a prefill's activations.
        cache: what is left for keys and values. tokens: how many it holds, over the replica.
    """

    weights: float
    work: float
    cache: float
    tokens: float

    def sequences(self, length: float) -> float:
        """How many sequences of that length fit."""
        return self.tokens / length


def rollout_weights(model: Model, kind: str) -> float:
    """Bytes of the rollout's weights; scales are under a thousandth of them."""
    quantized = model.quantized if kind != UNQUANTIZED else 0
    return BF16 * (model.parameters - quantized) + WEIGHT_BYTES[kind] * quantized


def rollout_memory(
    model: Model,
    kind: str,
    utilization: float,
    *,
    gpu_bytes: float,
    most: int,
    batched_tokens: int,
    tp: int = 1,
    kv_cache: str = UNQUANTIZED,
) -> RolloutMemory:
    """Bytes of the rollout. CUDA graphs and vLLM's own buffers are not counted, for want of a record.

    Args:
        utilization: ``gpu_memory_utilization``, of ``gpu_bytes``. most: ``max_num_seqs``.
        batched_tokens: ``max_num_batched_tokens``. kv_cache: what the cache holds.
    """
    weights = rollout_weights(model, kind) / tp
    work = 2 * 4 * model.vocabulary * most + BF16 * batched_tokens * (3 * model.inner + 4 * model.hidden) / tp
    cache = max(0.0, utilization * gpu_bytes - weights - work)
    return RolloutMemory(weights, work, cache, cache * tp / model.kv_bytes(kv_cache))
