# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An operation whose launch may also quantize its result for the next FP8 linear, byte for byte as the quantizer does:
its two operators, which are one step of autograd with one gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from jetrl_verl import reference
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.dispatch import implementation, implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.results import fake_rowwise
from jetrl_verl.kernels.views import as_rows, as_type
from jetrl_verl.reference import QuantizedTensor


class Quantizing:
    """An operation in both forms; called with its operands it gives the BF16 result.

    Args:
        name, quantizing: of the two forms. Backends of the second take the operands, the scale rule and whether the
            result is requested, and give it, or None, and its qdata; its reference is that of the first, quantized.
        arguments: the operands, as in a schema: two activations, then parameters, then what is not a tensor.
        fake: of the first form. check: raises where name and operands do not fit, when an operator runs.
        backward: (gradient of the result, *operands) -> gradients of the tensors among them.
        probe: ``ProbeInputs`` -> operands; None for an operation without a probe of its own.
    """

    def __init__(
        self,
        name: str,
        quantizing: str,
        arguments: str,
        *,
        fake: Callable,
        check: Callable,
        backward: Callable,
        probe: Callable | None = None,
    ) -> None:
        of_reference = implementation(name, "reference")

        def reference_quantizing(*call: Any) -> tuple[torch.Tensor | None, QuantizedTensor]:
            *operands, rule, requested = call
            result = of_reference(*operands)
            return result if requested else None, reference.quantize_1x128(as_rows(result), rule)

        def fake_quantizing(first: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, QuantizedTensor]:
            *operands, _, requested = rest
            result = fake(first, *operands)
            return result if requested else first.new_empty(0), fake_rowwise(result)

        def run(*operands: Any) -> torch.Tensor:
            check(name, *operands)
            return lookup(name, operands[0].device)(*operands)

        def run_quantizing(first: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, QuantizedTensor]:
            check(quantizing, first, *rest[:-2])
            result, rowwise = lookup(quantizing, first.device)(first, *rest)
            return first.new_empty(0) if result is None else result, rowwise

        def probe_quantizing(inputs: Any) -> QuantizedTensor:
            return self.quantized(*probe(inputs), rule="fp32", requested=False)

        implements(quantizing, "reference")(reference_quantizing)
        probes = (lambda inputs: self(*probe(inputs)), probe_quantizing) if probe is not None else (None, None)
        self.plain = operator(f"{name}({arguments}) -> Tensor", fake=fake, probe=probes[0])(run)
        schema = f"{quantizing}({arguments}, str rule, bool requested) -> (Tensor, Quantized)"
        self.quantize = operator(schema, fake=fake_quantizing, probe=probes[1])(run_quantizing)
        self.backward = backward

    def __call__(self, *operands: Any) -> torch.Tensor:
        return _Step.apply(self, None, *operands) if torch.is_grad_enabled() else self.plain(*operands)

    def quantized(self, *operands: Any, rule: str, requested: bool) -> QuantizedTensor:
        """qdata of the result, whose ``source`` is the result if requested, and where a gradient is recorded."""
        if torch.is_grad_enabled():
            result, qdata, scales = _Step.apply(self, rule, *operands)
            return QuantizedTensor(qdata, scales, result)
        result, (qdata, scales) = self.quantize(*operands, rule, requested)
        return QuantizedTensor(qdata, scales, result if requested else None)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operation: Quantizing, rule: str | None, *operands: Any):
        ctx.backward_of = operation.backward
        ctx.save_for_backward(*operands[:2])
        keep(ctx, *(x for x in operands[2:] if isinstance(x, torch.Tensor)))
        ctx.constants = [x for x in operands[2:] if not isinstance(x, torch.Tensor)]
        if rule is None:
            return operation.plain(*operands)
        result, (qdata, scales) = operation.quantize(*operands, rule, True)
        ctx.mark_non_differentiable(qdata, scales)
        ctx.set_materialize_grads(False)  # no zeros for the gradients of qdata
        return result, qdata, scales

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor, *_: Any):
        operands = *ctx.saved_tensors, *kept(ctx)
        gradients = ctx.backward_of(gradient, *operands, *ctx.constants)
        cast = (as_type(g, x.dtype) for g, x in zip(gradients, operands, strict=True))
        return None, None, *cast, *(None for _ in ctx.constants)
