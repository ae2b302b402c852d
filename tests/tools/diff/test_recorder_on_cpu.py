# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The recorder on a decoder of plain torch that behaves as vLLM's on a GPU: in-place norms and rotary, padded batches.

The second model runner orders requests itself and shows its batch in ``prepare_inputs`` only."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jetrl_verl.inputs import UserError
from jetrl_verl.models import family
from jetrl_verl.tools.diff.operations import Operation, operations
from jetrl_verl.tools.diff.recording import Recording
from jetrl_verl.tools.diff.rollout import Recorder

HIDDEN, HEADS, INNER, VOCABULARY, LAYERS = 8, 2, 12, 20, 2
PADDING = 3
QWEN3 = family({"model_type": "qwen3"})


class Norm(nn.Module):
    """Doubles; with a residual in place, as a fused kernel does."""

    def forward(self, x, residual=None):
        if residual is None:
            return 2 * x
        residual.add_(x)
        x.copy_(2 * residual)
        return x, residual


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = (torch.randn(outputs, inputs) / inputs**0.5).to(torch.bfloat16)
        self.output_size_per_partition = outputs

    def forward(self, x):
        return x @ self.weight.t(), None


class Rotary(nn.Module):
    def forward(self, positions, query, key):
        for x in (query, key):
            x.mul_(1 + positions[:, None] % 4)
        return query, key


class Core(nn.Module):
    def forward(self, query, key, value):
        return query + key - value


class Activation(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return gate * up


class Attention(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.q_size = self.kv_size = HIDDEN
        self.qkv_proj, self.o_proj = Linear(HIDDEN, 3 * HIDDEN), Linear(HIDDEN, HIDDEN)
        self.q_norm, self.k_norm, self.rotary_emb, self.attn = Norm(), Norm(), rotary, Core()

    def forward(self, positions, hidden_states):
        q, k, v = self.qkv_proj(hidden_states)[0].split(HIDDEN, dim=-1)
        q, k = (norm(x.unflatten(-1, (HEADS, -1))).flatten(1) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.act_fn, self.down_proj = Linear(HIDDEN, 2 * INNER), Activation(), Linear(INNER, HIDDEN)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Layer(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(rotary), MLP()
        self.between = lambda x: x

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.between(self.self_attn(positions=positions, hidden_states=hidden_states))
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rotary = Rotary()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
        self.layers, self.norm = nn.ModuleList(Layer(rotary) for _ in range(LAYERS)), Norm()

    def forward(self, ids, positions):
        hidden, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Decoder(), Linear(HIDDEN, VOCABULARY)
        self.config = {"num_hidden_layers": LAYERS}

    def compute_logits(self, hidden):
        return self.head(hidden)[0]


class Runner:
    """Runs (request, first position, tokens) as one step and always samples token 0."""

    def __init__(self, sequences, second: bool) -> None:
        torch.manual_seed(0)
        self.model, self.sequences = Model(), sequences
        self.sampler = SimpleNamespace(sample=lambda logits: (torch.zeros(len(logits), dtype=torch.int64), None))
        self.drawn = {}
        if second:
            self.prepare_inputs = self._prepare
        else:
            self.input_batch = None

    def _prepare(self, scheduled):
        return SimpleNamespace(req_ids=sorted(scheduled.num_scheduled_tokens, key=scheduled.num_scheduled_tokens.get))

    def execute_model(self, scheduled):
        if hasattr(self, "prepare_inputs"):
            batch = self.prepare_inputs(scheduled)
        else:
            batch = self.input_batch = SimpleNamespace(req_ids=[*scheduled.num_scheduled_tokens][::-1])
        spans = [(name, scheduled.starts[name], scheduled.num_scheduled_tokens[name]) for name in batch.req_ids]
        positions = [p for _, start, count in spans for p in range(start, start + count)]
        ids = [self.sequences[name][p] for name, start, count in spans for p in range(start, start + count)]
        ids, positions = (torch.tensor(x + [0] * PADDING) for x in (ids, positions))
        with torch.no_grad():
            hidden = self.model.model(ids, positions)
            ends = torch.tensor([count for _, _, count in spans]).cumsum(0) - 1
            draw = getattr(self.sampler, "draw", self.sampler.sample)  # the shared sampler's, where it is one
            drawn, _ = draw(self.model.compute_logits(hidden[ends]))
        self.drawn |= dict(zip(((name, start + count) for name, start, count in spans), drawn.tolist(), strict=True))


SEQUENCES = {"x-7": [3, 1, 4, 1, 5, 9, 2], "x-2": [6, 5, 3], "x-5": [8, 9, 7, 9, 3]}
PROMPTS = {"x-7": 5, "x-2": 1, "x-5": 2}
# A prompt in two chunks next to others, and a request that is preempted and recomputed.
STEPS = [
    {"x-7": (0, 3), "x-2": (0, 1)},
    {"x-2": (1, 1), "x-7": (3, 2), "x-5": (0, 2)},
    {"x-5": (2, 1), "x-7": (5, 1)},
    {"x-5": (0, 4)},
]


def recorded(second: bool, steps=STEPS, change=lambda runner: None) -> tuple[Runner, Recorder, Recording]:
    runner = Runner(SEQUENCES, second)
    change(runner)
    recorder = Recorder(runner, QWEN3, list(SEQUENCES.values()), VOCABULARY - 2)
    seen = set()
    for step in steps:
        new = [name for name in step if name not in seen or (second and step[name][0] == 0)]
        # Requests are added in the order of the sequences.
        new.sort(key=[*SEQUENCES].index)
        seen |= set(new)
        scheduled = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            num_scheduled_tokens={name: count for name, (_, count) in step.items()},
            starts={name: start for name, (start, _) in step.items()},
        )
        runner.execute_model(scheduled)
    prompts = [sequence[: PROMPTS[name]] for name, sequence in SEQUENCES.items()]
    responses = [sequence[PROMPTS[name] :] for name, sequence in SEQUENCES.items()]
    return runner, recorder, Recording(prompts, responses, torch.zeros(sum(map(len, responses))))


def expected(model: Model, recording: Recording) -> dict[Operation, torch.Tensor]:
    """The decoder's formulas on all tokens, nothing in place."""
    ids = torch.tensor(sum(recording.sequences, []))
    positions = torch.cat([torch.arange(len(s)) for s in recording.sequences])
    outputs, total = {}, None
    stream = outputs[Operation(None, "embedding")] = model.model.embed_tokens.weight.detach()[ids]
    for number, layer in enumerate(model.model.layers):

        def give(name: str, x: torch.Tensor, number: int = number) -> torch.Tensor:
            return outputs.setdefault(Operation(number, name), x)

        attention, mlp = layer.self_attn, layer.mlp
        total = stream if total is None else give("input_residual", total + stream)
        normed = give("input_norm", 2 * total)
        q, k, v = (normed @ attention.qkv_proj.weight.t()).split(HIDDEN, dim=-1)
        q, k, v = give("q_proj", q), give("k_proj", k), give("v_proj", v)
        turn = 1 + positions[:, None] % 4
        q, k = (give(f"{n}_rotary", give(f"{n}_norm", 2 * x) * turn) for n, x in (("q", q), ("k", k)))
        stream = give("o_proj", give("attention", q + k - v) @ attention.o_proj.weight.t())
        total = give("post_residual", total + stream)
        gate, up = (give("post_norm", 2 * total) @ mlp.gate_up_proj.weight.t()).split(INNER, dim=-1)
        product = give("activation", give("gate_proj", gate) * give("up_proj", up))
        stream = give("down_proj", product @ mlp.down_proj.weight.t())
    total = outputs[Operation(None, "final_residual")] = total + stream
    hidden = outputs[Operation(None, "final_norm")] = 2 * total
    outputs[Operation(None, "lm_head")] = (hidden[recording.drawing] @ model.head.weight.t())[:, : VOCABULARY - 2]
    return outputs


def share_sampler(runner: Runner) -> None:
    runner.sampler.draw, runner.sampler.sample = runner.sampler.sample, None


@pytest.mark.parametrize("second", [False, True], ids=["first runner", "second runner"])
@pytest.mark.parametrize("change", [lambda runner: None, share_sampler], ids=["vLLM's sampler", "shared sampler"])
def test_every_operation_is_recorded_under_its_token(second, change):
    runner, recorder, recording = recorded(second, change=change)
    names = operations([QWEN3] * LAYERS)[:-1]
    outputs, formulas = recorder.outputs(recording.drawing, names), expected(runner.model, recording)
    assert list(outputs) == names and outputs.keys() == formulas.keys()
    for name, output in formulas.items():
        assert outputs[name].dtype == torch.bfloat16 and outputs[name].shape == output.shape, name
        # A row of a BF16 product may depend on the batch in its last bit.
        assert (outputs[name].float() - output.float()).abs().max() <= 2**-5 * output.abs().max(), name
    # The sampled tokens are replaced by those of the sequences.
    assert set(runner.drawn.items()) == {((n, p), SEQUENCES[n][p]) for n, p in runner.drawn}


def test_an_unknown_operation_between_two_others_is_an_error():
    def scale(runner):
        runner.model.model.layers[1].between = lambda x: x * 1.5

    with pytest.raises(UserError, match="the input of layer 1 post_norm in the rollout is not the output of the op"):
        recorded(True, change=scale)


def test_rows_off_the_schedulers_layout_are_an_error():
    def swap(runner):
        runner.sequences = SEQUENCES | {"x-5": [8, 9, 7, 1, 3]}

    with pytest.raises(UserError, match="does not have the layout of its scheduler"):
        recorded(True, change=swap)


def test_a_token_that_never_ran_is_an_error():
    _, recorder, recording = recorded(True, steps=STEPS[:-1])
    with pytest.raises(UserError, match="embedding of the rollout ran for 11 of 12 tokens"):
        recorder.outputs(recording.drawing, operations([QWEN3] * LAYERS)[:-1])


def test_a_closed_recorder_leaves_no_hook_and_no_reference():
    """vLLM keeps rotary modules for later engines of the process; a hook on one would keep the runner's memory."""
    runner, recorder, _ = recorded(True)
    rotary = runner.model.model.layers[0].self_attn.rotary_emb
    recorder.close()
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in runner.model.modules()]
    assert not any(before or after for before, after in hooks)
    gone = weakref.ref(runner)
    del runner, recorder
    gc.collect()
    assert gone() is None and rotary is not None
