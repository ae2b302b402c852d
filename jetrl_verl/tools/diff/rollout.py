# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: it samples, or it repeats given responses and records every operation.

``python -m jetrl_verl.tools.diff.rollout REQUEST`` reads a ``Request`` and writes a ``Recording`` (recording.py).

To repeat, the sampled tokens are replaced by the given ones before vLLM looks up their log-probabilities. A row of a
batch belongs to a request by the order in the model runner's batch and the scheduler's token counts, and to a position
by the layers' positions; its token id must be the sequence's, and every token must be recorded. So chunked prompts and
preemption are supported. vLLM's fused norm and rotary write into their inputs, so outputs are copied at once and inputs
are checked before the operation runs: they must equal the recorded outputs of earlier operations in every bit.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from jetrl_verl import formats, kernels, models
from jetrl_verl.config.job import Job
from jetrl_verl.config.support.table import refusal
from jetrl_verl.formats.caches import KVCache
from jetrl_verl.inputs import UserError
from jetrl_verl.models.families.base import DeltaNet, Family, leaf
from jetrl_verl.nn.chunked_logits import mask_unused
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.diff.measures import bits
from jetrl_verl.tools.diff.operations import Operation, dense_choice, in_layer, operations
from jetrl_verl.tools.diff.recording import Recording, Request
from jetrl_verl.tools.diff.trainer import load_master

FLAGS = ("keeps_rows", "one_by_one", "adds_rows")
"""Attributes of modules of rollout/. If true, intermediate results of fused launches become tensors: unquantized rows
of norms and activations, QK norms before rotary, the sum of a mixture's experts."""


class Recorder:
    """Hooks on a live model runner that repeat responses and record the output of every operation.

    Args:
        runner: vLLM's model runner, of either version. family: of its model. shared: it runs the shared operations.
        kv_cache: format of the cache; None for BF16.
        sequences: prompt and response of each request, in the order in which the requests will be added.
        vocabulary: number of logits to keep. banned: tokens among them that are never sampled.
    """

    def __init__(
        self,
        runner: Any,
        family: Family,
        sequences: Sequence[Sequence[int]],
        vocabulary: int,
        shared: bool = True,
        kv_cache: KVCache | None = None,
        banned: Sequence[int] = (),
    ) -> None:
        self._family, self._shared, self._kv_cache = family, shared, kv_cache
        self._undo = contextlib.ExitStack()
        self._runner, self._sequences, self._vocabulary, self._banned = runner, sequences, vocabulary, banned
        lengths = [len(sequence) - 1 for sequence in sequences]
        # Outputs that the next residual sum adds.
        self._streams = ("embedding", leaf(family.o), self._last_of(family))
        if family.delta_net is not None:
            self._streams += (leaf(family.delta_net.out),)
        self._starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self._tokens = sum(lengths)
        self._requests: dict[str, int] = {}
        self._parts: dict[Operation, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        # Of the current step: (request, tokens) in batch order, token number of each row, outputs by name.
        self._order: list[tuple[str, int]] = []
        self._rows = torch.empty(0)
        self._now: dict[str, torch.Tensor] = {}
        self._layer: int | None = None
        self._install(runner.model)

    def _last_of(self, family: Family) -> str:
        """The last operation of a layer."""
        if family.experts is None:
            return leaf(family.down)
        if family.experts.shared_gate:
            return "shared_sum"
        return "combine" if self._shared else "experts"

    # --- hooks -------------------------------------------------------------------------------------------------------

    def _install(self, model: torch.nn.Module) -> None:
        family, runner = self._family, self._runner
        self._wrap(runner, "execute_model", self._around_step)
        if hasattr(runner, "prepare_inputs"):
            self._wrap(runner, "prepare_inputs", self._around_inputs)
        self._wrap(model, "compute_logits", self._around_logits)
        for name in ("sample", "draw"):  # one of them samples in a step
            if hasattr(runner.sampler, name):
                self._wrap(runner.sampler, name, self._around_sample)
        for module in model.modules():
            for flag in FLAGS:
                if hasattr(module, flag):
                    setattr(module, flag, True)
        self._hook(family.module(model, family.embedding).register_forward_hook(self._after_embedding))
        layers = list(family.named_layers(model))
        for number, (layer, names) in enumerate(layers):
            before = functools.partial(self._before_layer, number)
            self._hook(layer.register_forward_pre_hook(before, with_kwargs=True))
            self._watch_layer(layer, names, first=number == 0)
        # vLLM has one rotary module for all layers.
        layer, names = next((layer, names) for layer, names in layers if names.rotary)
        heads = names.q_norm or names.q, names.k_norm or names.k
        self._watch(layer.get_submodule(names.rotary), tuple(map(leaf, heads)), ("q_rotary", "k_rotary"))
        if family.experts is not None:
            self._watch_choices([layer for layer, _ in layers])
        if family.delta_net is not None:
            self._watch_delta_rules(family.delta_net)
        self._watch(family.module(model, family.final_norm), ("stream", "residual"), ("final_norm", "final_residual"))

    def _watch_layer(self, layer: torch.nn.Module, family: Family, first: bool) -> None:
        get = layer.get_submodule
        stream = ("stream",) if first else ("stream", "residual")
        self._watch(get(family.input_norm), stream, ("input_norm", "input_residual"))
        if family.delta_net is None:
            self._watch_attention(layer, family)
        else:
            self._watch_delta_net(layer, family.delta_net)
        self._watch(get(family.post_norm), ("stream", "residual"), ("post_norm", "post_residual"))
        if family.experts is not None:
            self._watch(get(family.experts.block), ("post_norm",), (self._last_of(family),))
            if not self._shared:
                self._watch(get(family.experts.router), ("post_norm",), ("router",))
        if not family.has_mlp:
            return
        gate_up = get(family.gate_up)
        inner = [gate_up.output_size_per_partition // 2] * 2
        gate, up, down = map(leaf, (family.gate, family.up, family.down))
        self._watch(gate_up, ("post_norm",), (gate, up), split=inner)
        self._watch(get(family.activation), (gate, up), ("activation",), split_input=inner)
        self._watch(get(family.down), ("activation",), (down,))

    def _watch_attention(self, layer: torch.nn.Module, family: Family) -> None:
        get = layer.get_submodule
        attention = get(family.attention)
        q, k, v, o, q_norm, k_norm = map(leaf, (family.q, family.k, family.v, family.o, family.q_norm, family.k_norm))
        query, wide = (f"{q} without gates", 2 * attention.q_size) if family.gated else (q, attention.q_size)
        heads = [wide, attention.kv_size, attention.kv_size]

        def keep_query(*_: Any) -> None:
            if self._order:
                self._now[query] = self._now[q].unflatten(-1, (attention.num_heads, 2, -1))[:, :, 0].flatten(1)

        self._watch(get(family.qkv), ("input_norm",), (q, k, v), split=heads)
        if family.gated:
            self._hook(get(family.qkv).register_forward_hook(keep_query))
        if q_norm:
            self._watch(get(family.q_norm), (query,), (q_norm,))
        if k_norm:
            self._watch(get(family.k_norm), (k,), (k_norm,))
        self._watch(get(family.core), ("q_rotary", "k_rotary", v), ("attention",))
        if self._kv_cache is not None and self._kv_cache.traits.quantized:
            self._hook(get(family.core).register_forward_pre_hook(self._keep_cached))
        if family.gated:
            self._watch_input(get(family.o), "gated")
        self._watch(get(family.o), ("gated" if family.gated else "attention",), (o,))

    def _watch_delta_net(self, layer: torch.nn.Module, names: DeltaNet) -> None:
        get = layer.get_submodule
        z, out = get(names.block).value_dim, leaf(names.out)
        projection = get(names.qkvz)
        heads = [projection.output_size_per_partition - z, z]
        self._watch(projection, ("input_norm",), (leaf(names.qkv), leaf(names.z)), split=heads)
        self._watch_input(get(names.norm), "delta_rule")
        self._watch_input(get(names.out), "gated_norm")
        self._watch(get(names.out), ("gated_norm",), (out,))

    def _watch_delta_rules(self, names: DeltaNet) -> None:
        """Record the convolution, and b and a, which only the rule reads."""

        def convolved(convolve: Callable, *args: Any) -> torch.Tensor:
            rows = convolve(*args)
            if self._order:
                self._keep("convolution", rows[: len(self._rows)])
            return rows

        def ruled(rule: Callable, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *args: Any) -> None:
            if self._order:
                for name, rows in ((names.b, b), (names.a, a)):
                    self._keep(leaf(name), rows[: len(self._rows)])
            rule(qkv, b, a, *args)

        self._exchange(kernels, "causal_conv1d_update", convolved)
        self._exchange(kernels, "gated_delta_rule_update", ruled)

    def _watch_input(self, module: torch.nn.Module, name: str) -> None:
        """Record the first input of ``module`` as the output of an operation before it."""

        def before(module: torch.nn.Module, args: tuple) -> None:
            if self._order:
                self._keep(name, self._floating(args, None)[0])

        self._hook(module.register_forward_pre_hook(before))

    def _keep_cached(self, module: torch.nn.Module, args: tuple) -> None:
        """Record the keys and values that attention reads, quantized and dequantized again.

        They are not read from the cache's pages, so a wrong page shows as a difference of attention.
        """
        if self._order:
            k, v = (self._now[name].unflatten(1, (-1, module.head_size)) for name in ("k_rotary", leaf(self._family.v)))
            for name, seen in zip(("k_cache", "v_cache"), self._kv_cache.seen(k, v), strict=True):
                self._keep(name, seen.flatten(1))

    def _watch_choices(self, layers: Sequence[torch.nn.Module]) -> None:
        """Record a mixture's choice; with shared operations also router logits, the experts before their sum, and what
        is added to a shared expert.

        The choice is made by the flow's operator or by vLLM's: a router's method on a GPU, a function on a CPU.
        """

        def routed(route: Callable, logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, Any, Any]:
            weights, segments, rows = route(logits, *args)
            if self._order:
                if self._shared:
                    self._keep("router", logits[: len(self._rows)])
                # The expert of each pair is the one whose segment has its row.
                chosen = torch.searchsorted(segments.start[1:].contiguous(), segments.row.contiguous(), right=True)
                self._keep("choice", dense_choice(chosen, weights, logits.shape[1])[: len(self._rows)])
            return weights, segments, rows

        def selected(select: Callable, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            weights, chosen = select(*args, **kwargs)
            if self._order:
                choice = dense_choice(chosen, weights, kwargs["router_logits"].shape[1])
                self._keep("choice", choice[: len(self._rows)])
            return weights, chosen

        def combined(combine: Callable, y: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            if self._order and self._shared:
                self._keep("experts", y[row.long()].flatten(1)[: len(self._rows)])
            return combine(y, row)

        def added(add: Callable, *operands: torch.Tensor) -> torch.Tensor:
            if self._order:
                routed, _, logits = operands
                for name, rows in (("combine", routed), (leaf(self._family.experts.shared_gate), logits)):
                    self._keep(name, rows[: len(self._rows)])
            return add(*operands)

        self._exchange(kernels, "route_and_permute", routed)
        self._exchange(kernels, "combine", combined)
        self._exchange(kernels, "add_shared_expert", added)
        if not self._shared:
            from jetrl_verl.rollout.vllm_compat import cpu_experts

            self._exchange(cpu_experts(), "select_experts", selected)
            for layer in layers:
                self._wrap(layer.get_submodule(self._family.experts.block).experts.router, "select_experts", selected)

    def _watch(
        self,
        module: torch.nn.Module,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        *,
        split: list[int] | None = None,
        split_input: list[int] | None = None,
    ) -> None:
        """Check the ``inputs`` of ``module`` against recorded operations and record its ``outputs``."""

        def before(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if self._order:
                given = self._floating([*args, *kwargs.values()], split_input)
                for name, tensor in zip(inputs, given, strict=True):
                    if not torch.equal(bits(self._now[name]), bits(tensor)):
                        raise UserError(
                            f"the input of {in_layer(self._layer, outputs[0])} in the rollout is not the output of "
                            "the operations before it, so jetrl diff does not know what runs between them; use a "
                            "decoder of a supported type."
                        )

        def after(module: torch.nn.Module, args: tuple, result: Any) -> None:
            if self._order:
                tensors = self._floating(result if type(result) is tuple else (result,), split)
                # The first norm has no residual and returns one tensor instead of two.
                for name, tensor in zip(outputs, tensors, strict=False):
                    self._keep(name, tensor)

        self._hook(module.register_forward_pre_hook(before, with_kwargs=True))
        self._hook(module.register_forward_hook(after))

    def _floating(self, values: Sequence[Any], split: list[int] | None) -> list[torch.Tensor]:
        """The activations among ``values`` as ``[rows, features]``, padding cut off."""
        values = [x.source if isinstance(x, QuantizedTensor) else x for x in values]
        tensors = [x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]
        rows = [x.reshape(len(x), -1)[: len(self._rows)] for x in tensors]
        return [piece for x in rows for piece in x.split(split, dim=-1)] if split else rows

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._now[name] = tensor = tensor.clone()
        if name == "embedding" or name.endswith("_residual"):
            self._now["residual"] = tensor
        if name in self._streams:
            self._now["stream"] = tensor
        self._parts.setdefault(in_layer(self._layer, name), []).append((self._rows, tensor.cpu()))

    # --- a step ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(inner, *args, **kwargs))

    def _exchange(self, module: Any, name: str, around: Callable[..., Any]) -> None:
        """:meth:`_wrap` until :meth:`close`."""
        inner = getattr(module, name)
        self._undo.callback(setattr, module, name, inner)
        self._wrap(module, name, around)

    def _hook(self, hook: RemovableHandle) -> None:
        """Remove a hook on :meth:`close`. vLLM keeps rotary modules for the next engine of the process; a hook that
        stayed on one would run there and keep this engine's memory."""
        self._undo.callback(hook.remove)

    def close(self) -> None:
        """Remove all hooks."""
        self._undo.close()

    def _around_step(self, execute: Callable, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduled.scheduled_new_reqs:
            # Requests are scheduled in order; a preempted one may come as new again.
            self._requests.setdefault(new.req_id, len(self._requests))
        self._scheduled = scheduled
        return execute(scheduled, *args, **kwargs)

    def _around_inputs(self, prepare: Callable, *args: Any, **kwargs: Any) -> Any:
        """The second model runner makes a batch for each step and does not keep it."""
        self._batch = prepare(*args, **kwargs)
        return self._batch

    def _after_embedding(self, module: torch.nn.Module, args: tuple, result: torch.Tensor) -> None:
        batch = self._batch if hasattr(self._runner, "prepare_inputs") else self._runner.input_batch
        counts = self._scheduled.num_scheduled_tokens
        self._order = [(name, counts[name]) for name in batch.req_ids if name in counts]
        rows = sum(count for _, count in self._order)
        self._embedded = args[0][:rows].cpu().long(), result[:rows].clone()
        self._now = {}

    def _before_layer(self, number: int, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._layer = number
        if number == 0 and self._order:
            self._place(args[0] if args else kwargs["positions"])

    def _place(self, positions: torch.Tensor) -> None:
        """Set the token numbers of this step's rows; ``UserError`` if a token id is not the sequence's."""
        ids, embedded = self._embedded
        positions = positions[0] if positions.ndim == 2 else positions  # of text, where the rows of mRoPE are equal
        positions = positions[: len(ids)].cpu().long()
        owners = torch.tensor([self._requests[name] for name, count in self._order for _ in range(count)])
        expected = torch.tensor(
            [self._sequences[o][p] for o, p in zip(owners.tolist(), positions.tolist(), strict=True)]
        )
        if not torch.equal(expected, ids):
            raise UserError(
                "the rollout's batch does not have the layout of its scheduler, so rows have no known request; this is "
                "a defect of jetrl diff with this version of vLLM."
            )
        self._rows = torch.tensor(self._starts)[owners] + positions
        ends = torch.tensor([count for _, count in self._order]).cumsum(0) - 1
        self._ends = list(zip(owners[ends].tolist(), positions[ends].tolist(), strict=True))
        self._keep("embedding", embedded)

    def _around_logits(self, compute: Callable, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = compute(hidden, *args, **kwargs)
        if self._order:
            rows = torch.tensor([self._starts[owner] + position for owner, position in self._ends])
            kept = logits[: len(rows), : self._vocabulary].cpu()
            kept = mask_unused(kept.clone(), None, self._banned)  # minus infinity here, and not in the trainer
            self._parts.setdefault(Operation(None, "lm_head"), []).append((rows, kept))
        return logits

    def _around_sample(self, sample: Callable, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        sampled, rest = sample(*args, **kwargs)
        if self._order:
            given = [self._sequences[owner][position + 1] for owner, position in self._ends]
            sampled = sampled.clone()
            sampled[: len(given)] = torch.tensor(given, dtype=sampled.dtype, device=sampled.device)
            self._order = []  # until the next step, nothing that runs belongs to a request
        return sampled, rest

    def outputs(self, drawing: torch.Tensor, expected: Sequence[Operation]) -> dict[Operation, torch.Tensor]:
        """The outputs of all steps, ``[tokens, features]``; of ``lm_head`` those of the tokens ``drawing``.

        Raises:
            UserError: an operation did not run for every token.
        """
        outputs = {}
        for operation in expected:
            parts = self._parts.pop(operation, [])
            rows = torch.cat([rows for rows, _ in parts]) if parts else torch.empty(0, dtype=torch.int64)
            tokens = drawing if operation.name == "lm_head" else torch.arange(self._tokens)
            if not torch.isin(tokens, rows).all():
                raise UserError(
                    f"{operation} of the rollout ran for {len(rows.unique())} of {len(tokens)} tokens, so the "
                    "recording is incomplete; use a decoder of a supported type."
                )
            output = parts[0][1].new_empty(self._tokens, parts[0][1].shape[1])
            for rows, values in parts:
                output[rows] = values
            outputs[operation] = output[drawing] if operation.name == "lm_head" else output
        return outputs


def _weights(folder: str | Path, job: Job, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the trainer would send at a weight sync."""
    from jetrl_verl.sync.quantize import as_tensors, quantize_stream

    model, options = load_master(folder, job), job.options
    plans, tower = job.plans(model.config), f"{models.family(model.config).tower}."
    state = model.state_dict().items()
    stream = ((name, tensor.to(device)) for name, tensor in state if not name.startswith(tower))
    yield from as_tensors(quantize_stream(stream, plans, options.scale_rule))


def load_weights(runner: Any, folder: str | Path, job: Job) -> None:
    """Give a live model runner the policy in ``folder``, quantized as the trainer of ``job`` would send it."""
    from jetrl_verl.rollout.experts import is_of_experts, load_experts

    def without_experts() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _weights(folder, job, runner.device):
            if is_of_experts(name, runner.model.config):
                load_experts(runner.model, name, tensor, rank=0)
            else:
                yield name, tensor

    runner.model.load_weights(without_experts())


def start_engine(request: Request) -> tuple[Any, Any]:
    """(vLLM, its model runner) as ``request`` asks for, with the weights of its model."""
    from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits
    from vllm import LLM

    llm = LLM(request.model, skip_tokenizer_init=True, **request.arguments)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    if request.jetrl is not None:
        load_weights(runner, request.model, Job.of(request.jetrl))
    monkey_patch_compute_logits(runner.model, request.vocabulary, request.banned)
    return llm, runner


def generate(llm: Any, request: Request) -> Recording:
    """Sample responses, or repeat those of ``request``; the recording has no operations yet.

    Raises:
        UserError: the engine did not repeat the given responses.
    """
    from vllm import SamplingParams

    repeated = request.responses
    sampling = [
        SamplingParams(
            temperature=request.temperature,
            max_tokens=len(repeated[i]) if repeated is not None else request.response,
            ignore_eos=repeated is not None,
            stop_token_ids=[] if repeated is not None else request.stop,
            logprobs=0,
            detokenize=False,
        )
        for i in range(len(request.prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in request.prompts], sampling, use_tqdm=False)
    responses = [list(output.outputs[0].token_ids) for output in outputs]
    if repeated is not None and responses != repeated:
        raise UserError("the recorded rollout did not repeat the given tokens; this is a defect of jetrl diff.")
    log_probs = torch.tensor(
        [
            entry[token].logprob
            for output, response in zip(outputs, responses, strict=True)
            for entry, token in zip(output.outputs[0].logprobs, response, strict=True)
        ],
        dtype=torch.float32,
    )
    return Recording(request.prompts, responses, log_probs)


def run(request: Request) -> Recording:
    """Start the engine, give it its weights, sample or repeat.

    Raises:
        UserError: the model has operations that cannot be recorded.
    """
    llm, runner = start_engine(request)
    if request.responses is None:
        return generate(llm, request)
    sequences = [prompt + response for prompt, response in zip(request.prompts, request.responses, strict=True)]
    try:
        family = models.family(llm.llm_engine.model_config.hf_config)
    except models.UnsupportedLayer as error:
        words = {"what": f"the model {request.model}", "scope": "jetrl diff", "why": str(error)}
        raise UserError(refusal("model_of_a_command", **words)) from None
    shared = request.jetrl is not None and request.jetrl["operations"] == "shared"
    kv_cache = formats.kv_cache(formats.UNQUANTIZED if request.jetrl is None else request.jetrl["kv_cache"])
    recorder = Recorder(runner, family, sequences, request.vocabulary, shared, kv_cache, request.banned)
    with contextlib.closing(recorder):
        recording = generate(llm, request)
    expected = operations(family.kinds(runner.model.config), shared, kv_cache.traits.quantized)[:-1]
    recording.outputs = recorder.outputs(recording.drawing, expected)
    recording.outputs[Operation(None, "sampler")] = recording.log_probs[:, None]
    return recording


def main(path: str) -> None:
    """Entry of the program; ``path`` is a request as JSON. A ``UserError``'s message is written next to ``out``."""
    # With the scheduler in another process the model could not be reached.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    request = Request(**json.loads(Path(path).read_text()))
    try:
        run(request).save(request.out)
    except UserError as error:
        Path(request.out).with_suffix(".error").write_text(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
