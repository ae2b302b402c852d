# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's model as the engine builds it (train/engine.py), with a tap at every operation.

The recorded sequences run packed into one row, as verl computes old log-probabilities. A tap gets an operation and its
output and returns the value with which the model continues. Taps are module hooks; rotary, router logits and the
combination of experts are functions, which are replaced while the model runs. Attention's output, the activation's and
residual sums are tapped as inputs of the next module; a sum is written in place, since the next sum starts from it.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from jetrl_verl import kernels, models
from jetrl_verl.config.job import Job
from jetrl_verl.config.support.table import model_refusal, refusal
from jetrl_verl.inputs import UserError
from jetrl_verl.models.families.base import DeltaNet, Family, leaf
from jetrl_verl.nn.attention import AttentionCore
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.diff.operations import Operation, chosen_of, dense_choice, in_layer, operations
from jetrl_verl.tools.diff.prompts import Prompts
from jetrl_verl.tools.diff.recording import Recording, Request

Tap = Callable[[Operation, torch.Tensor], torch.Tensor]
"""(operation, its output ``[tokens, features]``) -> the value to continue with; the same tensor for no change."""

_ROTARY = ("q_rotary", "k_rotary")


def load_master(folder: str | Path, job: Job | None, **arguments: Any) -> torch.nn.Module:
    """The policy's weights on the CPU as the trainer holds them, invariant scaling folded in."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from jetrl_verl.algorithms.invariant_scaling import fold_missing, folded_in

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    scaled = job is not None and job.options.invariant_scaling != folded_in(config)
    # Folding rounds in FP32, as in the engine; without it both sides read BF16 values.
    dtype = torch.float32 if scaled else torch.bfloat16
    vision = type(config) in AutoModelForImageTextToText._model_mapping
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=dtype, local_files_only=True, **arguments)
    if scaled:
        fold_missing(model, job.options.invariant_scaling)
    return model


Replaced = Iterator[tuple[Any, str, Any]]
"""(module, name of a function in it, the function to call while the model runs)."""


class Trainer:
    """A policy that computes log-probabilities of recorded tokens; ``operations`` are those that are tapped, in order.

    Args:
        folder: Hugging Face folder. job: of the precision, None for bf16. masks: what is never sampled, as ``Prompts``
            and ``Request`` have it. temperature: of the sampling.

    Raises:
        UserError: the precision does not support this model.
    """

    def __init__(
        self, folder: str | Path, job: Job | None, masks: Prompts | Request, temperature: float, device: torch.device
    ) -> None:
        from transformers.utils import is_flash_attn_2_available

        from jetrl_verl.nn.chunked_logits import mask_unused_vocabulary
        from jetrl_verl.train.shared_operations import share_operations

        self._device, self._vocabulary, self._temperature = device, masks.vocabulary, temperature
        self._shared = job is not None and job.shared
        flash = device.type == "cuda" and is_flash_attn_2_available() and not self._shared
        model = load_master(folder, job, attn_implementation="flash_attention_2" if flash else "sdpa")
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)  # as FSDP casts it; buffers keep their type
        self._model = model = model.to(device).eval()
        try:
            self._family = models.family(model.config)
            if job is not None and job.quantizes("actor"):
                rule, backward = job.options.scale_rule, job.options.backward
                replace_linears(model, job.plans(model.config), scale_rule=rule, backward=backward)
            if self._shared:
                share_operations(model, job.options.kv_cache)
        except models.Unsupported as error:
            if job is None:
                words = {"what": f"the model {folder}", "scope": "jetrl diff", "why": str(error)}
                raise UserError(refusal("model_of_a_command", **words)) from None
            raise UserError(model_refusal(error, str(folder), job.options.precision)) from None
        head = model.get_output_embeddings()
        # verl's own engine leaves a padded vocabulary unmasked.
        if job is not None and (masks.banned or head.weight.shape[0] > masks.vocabulary):
            mask_unused_vocabulary(model, masks.vocabulary, masks.banned)
        self._cached = job is not None and job.cache.quantized
        self.operations = operations(self._family.kinds(model.config), self._shared, self._cached)
        self._tap: Tap = lambda operation, output: output
        self._layer: int | None = None
        self._install()

    def _install(self) -> None:
        decoder, mixture = self._model.get_decoder(), self._family.experts
        self._after(decoder.embed_tokens, "embedding")
        for number, (layer, names) in enumerate(self._family.named_layers(self._model)):
            layer.register_forward_pre_hook(functools.partial(self._enter, number))
            input_norm, post_norm = layer.get_submodule(names.input_norm), layer.get_submodule(names.post_norm)
            if number:
                self._before(input_norm, "input_residual", in_place=True)
            self._after(input_norm, "input_norm")
            if names.delta_net is None:
                self._watch_attention(layer, names)
            else:
                self._watch_delta_net(layer, names.delta_net)
            self._before(post_norm, "post_residual", in_place=True)
            self._after(post_norm, "post_norm")
            if names.has_mlp:
                for name in (names.gate, names.up, names.down):
                    self._after(layer.get_submodule(name), leaf(name))
                self._before(layer.get_submodule(names.down), "activation")
            if mixture is None:
                continue
            layer.get_submodule(mixture.router).register_forward_hook(self._after_router)
            if not self._shared:
                self._after(layer.get_submodule(mixture.block), "experts")
        self._before(decoder.norm, "final_residual", in_place=True)
        self._after(decoder.norm, "final_norm")
        self._model.get_output_embeddings().register_forward_hook(self._after_head)

    def _watch_attention(self, layer: torch.nn.Module, names: Family) -> None:
        norms = (names.q_norm, names.k_norm) if not self._shared else ()
        for name in filter(None, (names.q, names.k, names.v, names.o, *norms)):
            self._after(layer.get_submodule(name), leaf(name))
        if self._cached:
            self._watch_cache(layer)
        if names.gated:
            self._after(layer.get_submodule(names.attention).core, "attention")
        self._before(layer.get_submodule(names.o), "gated" if names.gated else "attention")

    def _watch_delta_net(self, layer: torch.nn.Module, names: DeltaNet) -> None:
        for name in (names.qkv, names.z, names.out):
            self._after(layer.get_submodule(name), leaf(name))
        self._before(layer.get_submodule(names.out), "gated_norm")

    def _watch_cache(self, layer: torch.nn.Module) -> None:
        """Run shared attention in two steps: quantize and dequantize keys and values, then BF16 attention.

        Stock attention has no such step: its values are tapped at their projection, its keys after rotary.
        """
        if not self._shared:
            self._after(layer.get_submodule(self._family.v), "v_cache")
            return
        (core,) = (module for module in layer.modules() if isinstance(module, AttentionCore))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sequences: Any) -> torch.Tensor:
            k, v = core.kv_cache.seen(k, v)
            k, v = self._ask("k_cache", k), self._ask("v_cache", v)
            return kernels.attention(q, k, v, *sequences, core.scale)

        core.forward = attend

    def _ask(self, name: str, output: torch.Tensor | QuantizedTensor) -> torch.Tensor | QuantizedTensor:
        values = output.source if isinstance(output, QuantizedTensor) else output
        rows = values.reshape(self._tokens, -1)
        answer = self._tap(in_layer(self._layer, name), rows)
        # A tap's answer to quantized data is a tensor, which the next layers quantize.
        return output if answer is rows else answer.view(values.shape)

    def _after(self, module: torch.nn.Module, name: str) -> None:
        module.register_forward_hook(lambda module, args, output: self._ask(name, output))

    def _before(self, module: torch.nn.Module, name: str, in_place: bool = False) -> None:
        def hook(module: torch.nn.Module, args: tuple) -> tuple:
            answer = self._ask(name, args[0])
            if answer is args[0]:
                return args
            return (args[0].copy_(answer) if in_place else answer, *args[1:])

        module.register_forward_pre_hook(hook)

    def _enter(self, number: int, module: torch.nn.Module, args: tuple) -> None:
        self._layer = number

    def _after_head(self, module: torch.nn.Module, args: tuple, logits: torch.Tensor) -> torch.Tensor:
        """Tap what the rollout has too: logits from which a token was sampled, and entries with a token."""
        logits = logits[:, self._drawing]
        rows = logits[0, :, : self._vocabulary]
        answer = self._tap(Operation(None, "lm_head"), rows)
        if answer is not rows:
            rows.copy_(answer)
        return logits

    def _after_router(self, module: torch.nn.Module, args: tuple, output: tuple) -> tuple:
        logits, weights, chosen = output
        rows = dense_choice(chosen, weights, logits.shape[-1])
        answer = self._tap(Operation(self._layer, "choice"), rows)
        if answer is rows:
            return output
        # In FP32, as in the rollout; the experts multiply in the wider type.
        experts, weights = chosen_of(answer, chosen.shape[-1])
        return logits, weights, experts.to(chosen.dtype)

    def _mixture(self) -> Replaced:
        """The functions of a router and of the experts' sums, with taps."""
        if not self._shared:
            # Only the router calls it by this name.
            modeling = sys.modules[type(self._model).__module__]
            linear = modeling.F.linear
            tapped = vars(modeling.F) | {"linear": lambda *args: self._ask("router", linear(*args))}
            yield modeling, "F", SimpleNamespace(**tapped)
            return
        route, combine, add = kernels.route, kernels.combine, kernels.add_shared_expert

        def combined(y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            rows = y[row.long()].flatten(1)
            answer = self._tap(Operation(self._layer, "experts"), rows)
            if answer is not rows:
                y = y.index_copy(0, row.flatten().long(), answer.view(-1, y.shape[1]))
            return self._ask("combine", combine(y, row))

        def added(routed: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            logits = self._ask(leaf(self._family.experts.shared_gate), logits)
            return self._ask("shared_sum", add(routed, shared, logits))

        yield kernels, "route", lambda logits, *args: route(self._ask("router", logits), *args)
        yield kernels, "combine", combined
        yield kernels, "add_shared_expert", added

    def _delta_nets(self) -> Replaced:
        """Convolution and rule, with taps, also of b and a, which only the rule reads."""
        names, convolve, rule = self._family.delta_net, kernels.causal_conv1d, kernels.gated_delta_rule

        def ruled(qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *args: Any) -> torch.Tensor:
            b, a = (self._ask(leaf(name), rows) for name, rows in ((names.b, b), (names.a, a)))
            return self._ask("delta_rule", rule(qkv, b, a, *args))

        yield kernels, "causal_conv1d", lambda *args: self._ask("convolution", convolve(*args))
        yield kernels, "gated_delta_rule", ruled

    def _rotary(self) -> Replaced:
        """The function that rotates queries and keys, with taps."""
        if self._shared:
            rotary = kernels.rotary

            def rotated(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return tuple(self._ask(name, x) for name, x in zip(_ROTARY, rotary(*args), strict=True))

            def one_by_one(q, k, q_weight, k_weight, eps, table, positions, unit_offset) -> tuple[torch.Tensor, ...]:
                q = self._ask(leaf(self._family.q_norm), kernels.rms_norm(q, q_weight, eps, unit_offset))
                k = self._ask(leaf(self._family.k_norm), kernels.rms_norm(k, k_weight, eps, unit_offset))
                return rotated(q, k, table, positions)

            yield (kernels, "norm_rotary", one_by_one) if self._family.q_norm else (kernels, "rotary", rotated)
            return
        modeling = sys.modules[type(self._model).__module__]
        rotate = modeling.apply_rotary_pos_emb

        def stock(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            # [1, heads, tokens, head size]
            outputs = zip(_ROTARY, rotate(*args, **kwargs), strict=True)
            q, k = (self._ask(name, x.transpose(1, 2)) for name, x in outputs)
            if self._cached:
                k = self._ask("k_cache", k)
            return q.transpose(1, 2), k.transpose(1, 2)

        yield modeling, "apply_rotary_pos_emb", stock

    @contextlib.contextmanager
    def _tapped(self) -> Iterator[None]:
        """Replace functions that are no modules by ones that call the tap."""
        replaced = [*self._rotary()]
        replaced += self._mixture() if self._family.experts is not None else ()
        replaced += self._delta_nets() if self._family.delta_net is not None else ()
        stock = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
        try:
            for owner, name, function in replaced:
                setattr(owner, name, function)
            yield
        finally:
            for owner, name, function in stock:
                setattr(owner, name, function)

    def _sample(self, logits: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Log-probabilities ``[n]`` FP32 of the tokens ``drawn`` under ``logits [n, V]``, as in the engine."""
        if self._shared:
            return kernels.log_probs(logits, drawn[:, None], logits.new_full((len(drawn),), self._temperature))[:, 0]
        from verl.utils.torch_functional import logprobs_from_logits

        if self._temperature != 1:
            logits = logits / torch.tensor(self._temperature, dtype=logits.dtype, device=logits.device)
        return logprobs_from_logits(logits, drawn, inplace_backward=False).float()

    @torch.no_grad()
    def log_probs(self, recording: Recording, tap: Tap) -> torch.Tensor:
        """Of every response token of ``recording``, ``[response tokens]`` FP32 on the CPU, with ``tap`` everywhere."""
        device = self._device
        sequences = recording.sequences
        ids = torch.tensor([[token for sequence in sequences for token in sequence]], device=device)
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None].to(device)
        self._tap, self._tokens, self._drawing = tap, ids.shape[1], recording.drawing.to(device)
        with self._tapped(), torch.autocast(device.type, torch.bfloat16):
            logits = self._model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        drawn = self._sample(logits, recording.drawn.to(device))
        return tap(Operation(None, "sampler"), drawn[:, None])[:, 0].cpu()
