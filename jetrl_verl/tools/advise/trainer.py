# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds of the trainer: old log-probabilities, reference, update. Equations: docs/advise.md, "Training".

A pass over T tokens is GEMMs of the layers and of lm_head at measured rates, attention at a measured rate, what lies
between at a measured multiple of the bytes that it must move, and for each gather the weights' cast and quantization.
Where the micro-batches are small the GPU waits for its host, which takes the same time for a layer of each.
"""

from dataclasses import dataclass, replace

from jetrl_verl.formats.catalog import FLOW, UNQUANTIZED
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.advise.shapes import BF16, Model

MOST_SEQUENCES = 256
"""Of a GPU, in the steps by which verl's own work goes."""


@dataclass(frozen=True)
class Flow:
    """What the trainer runs.

    Attributes:
        linears: ``bf16`` or ``fp8``, a set of GEMM rates.
        operations: ``stock`` (Hugging Face), ``liger`` or ``shared``, a set of rates of what lies between.
        backward: of the linears' gradients, ``bf16`` or ``fp8``; read with FP8 linears alone.
        varlen: whether attention is ``jetrl_varlen``'s, whose kernels are those of the shared operation.
    """

    linears: str
    operations: str
    backward: str = FLOW
    varlen: bool = False

    @property
    def attention(self) -> str:
        """The set of rates of attention."""
        return "shared" if self.varlen else self.operations


STOCK, LIGER = Flow(UNQUANTIZED, "stock"), Flow(UNQUANTIZED, "liger")
JET, JET_STOCK = Flow(FLOW, "shared"), Flow(FLOW, "stock")
BF16_SHARED = Flow(UNQUANTIZED, "shared")


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass by what they are spent on; ``host`` are those in which the GPU waits for it."""

    gemm: float = 0.0
    attention: float = 0.0
    between: float = 0.0
    weights: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*(a + b for a, b in zip(self.parts.values(), other.parts.values(), strict=True)))

    def __mul__(self, times: float) -> "Pass":
        return Pass(*(times * part for part in self.parts.values()))

    __rmul__ = __mul__

    @property
    def parts(self) -> dict[str, float]:
        return {
            "gemm": self.gemm,
            "attention": self.attention,
            "between": self.between,
            "weights": self.weights,
            "host": self.host,
        }


def between_bytes(model: Model, flow: Flow) -> float:
    """Bytes a token that one fused kernel per operation would move between the GEMMs of a forward: two residual norms,
    norms of heads and rotary, SiLU-mul, the quantizer in front of o, and the logits, written and read once; of a
    mixture also the copy of a token for each of its experts, their sum, and the router's logits."""
    heads = model.queries + model.keys
    quantizer = 3 * model.queries if flow.linears == FLOW else 0
    layer = 16 * model.hidden + 4 * heads * (2 if model.head_norms else 1) + 6 * model.inner + quantizer
    if (experts := model.experts) is not None:
        copies = 2 * (1 if flow.linears == FLOW else BF16)
        layer += experts.per_token * model.hidden * (copies + BF16) + 8 * experts.count
    logits = 8 if flow.operations == "shared" else 4
    return model.layers * layer + logits * model.vocabulary


def attention_operations(model: Model, tokens: float, context: float) -> float:
    """Of a causal forward: ``tokens`` queries that see ``context`` keys each in the mean."""
    return 4.0 * model.layers * model.queries * tokens * context


def forward(rates: Rates, model: Model, flow: Flow, tokens: float, context: float) -> Pass:
    """One forward of ``tokens`` tokens that see ``context`` keys each in the mean; weights aside."""
    return Pass(
        gemm=_gemms(rates, model, flow, tokens, "fprop"),
        attention=attention_operations(model, tokens, context) / rates[f"attention.{flow.attention}.forward"],
        between=tokens * rates[f"between.{flow.operations}.forward"] * between_bytes(model, flow) / rates["bandwidth"],
    )


def backward(rates: Rates, model: Model, flow: Flow, tokens: float, context: float) -> Pass:
    """The backward alone."""
    attention = 2.5 * attention_operations(model, tokens, context)
    between = 2 * between_bytes(model, flow)
    return Pass(
        gemm=_gemms(rates, model, flow, tokens, "dgrad") + _gemms(rates, model, flow, tokens, "wgrad"),
        attention=attention / rates[f"attention.{flow.attention}.backward"],
        between=tokens * rates[f"between.{flow.operations}.backward"] * between / rates["bandwidth"],
    )


def _gemms(rates: Rates, model: Model, flow: Flow, tokens: float, what: str) -> float:
    bf16 = rates[f"gemm.bf16.{what}"]
    fp8 = flow.linears == FLOW and (what == "fprop" or flow.backward == FLOW)
    quantized = model.active_quantized if fp8 else 0
    operations = 2 * tokens * (model.active - quantized + model.head)
    return operations / bf16 + 2 * tokens * quantized / rates[f"gemm.fp8.{what}"]


def gathered(rates: Rates, model: Model, flow: Flow, sharded: bool) -> Pass:
    """What every gather of the weights costs: the cast of the FP32 parameters under FSDP (``sharded``), read and
    written once, and their quantization with the transpose."""
    moved = 4 * model.quantized if flow.linears == FLOW else 0
    if sharded:
        moved += (4 + BF16) * model.parameters
    return Pass(weights=moved / rates["bandwidth"])


def host(rates: Rates, model: Model, flow: Flow, micro: float, kept: bool, updates: bool, again: bool = True) -> float:
    """Seconds of the host's work for ``micro`` micro-batches under FSDP2.

    Args:
        kept: whether weights stay gathered from one micro-batch to the next. updates: a forward and a backward, or a
            forward alone. again: whether the forward runs a second time in an update (activation checkpointing).
    """
    name = FLOW if flow.linears == FLOW else "shared" if flow.operations == "shared" else "stock"
    name = f"host.{name}.{'kept.' if kept else ''}"
    ahead = rates[f"{name}log_probs"]
    layer = rates[f"{name}update"] - (0.0 if again else ahead) if updates else ahead
    return micro * model.layers * layer


def _waits(done: Pass, host_seconds: float) -> Pass:
    """A pass with the seconds in which its GPU waits for the host."""
    return replace(done, host=max(0.0, host_seconds - done.total))


@dataclass(frozen=True)
class Batch:
    """What one GPU trains in a step.

    Attributes:
        tokens: of all its sequences. length: of a sequence, in the mean weighted by tokens, for attention.
        micro: micro-batches of a pass over all of them.
    """

    tokens: float
    length: float
    micro: float


def log_probs(
    rates: Rates, model: Model, flow: Flow, batch: Batch, sharded: bool = True, gathers: int | None = None
) -> Pass:
    """A forward of every token.

    Args:
        gathers: of all weights; one for each micro-batch if None.
    """
    one = forward(rates, model, flow, batch.tokens, batch.length / 2)
    one += (batch.micro if gathers is None else gathers) * gathered(rates, model, flow, sharded)
    return _waits(one, host(rates, model, flow, batch.micro, gathers is not None, updates=False))


def update(
    rates: Rates,
    model: Model,
    flow: Flow,
    batch: Batch,
    *,
    checkpointing: bool = True,
    epochs: int = 1,
    sharded: bool = True,
    gathers: int | None = None,
) -> Pass:
    """Forward and backward of every token, the optimizer aside; with checkpointing the layers' forward runs twice.

    Args:
        gathers: of all weights in an epoch; two for each micro-batch if None.
    """
    ahead = forward(rates, model, flow, batch.tokens, batch.length / 2)
    behind = backward(rates, model, flow, batch.tokens, batch.length / 2)
    again = ahead if checkpointing else Pass()
    kept = gathers is not None
    gathers = gathers if kept else 2 * batch.micro
    done = ahead + again + behind + gathers * gathered(rates, model, flow, sharded)
    return epochs * _waits(done, host(rates, model, flow, batch.micro, kept, updates=True, again=checkpointing))


def optimizer(rates: Rates, model: Model, gpus: int, steps: int) -> float:
    """Seconds of AdamW on the FP32 shard of one GPU: 28 bytes a parameter."""
    return steps * 28 * model.parameters / gpus / rates["optimizer"]


def verls_work(rates: Rates, name: str, sequences: float) -> float:
    """Seconds of verl's own work around a phase in which each GPU has so many sequences; ``name``: its rate."""
    return rates[name] + sequences * rates[f"{name}.sequence"]
