# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Later weight syncs repeat the copies that vLLM's loaders made at the first one, with the same bits and no loader.
What is not a copy is loaded again, and a copy to a wrong place is detected."""

from types import SimpleNamespace

import pytest
import torch
import vllm_engine
from tiny_models import tiny_model

from jetrl_verl import formats
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.rollout import live as live_module
from jetrl_verl.rollout.copies import Copies
from jetrl_verl.sync.contract import ContractViolation, with_contract
from jetrl_verl.sync.stacks import Stack
from jetrl_verl.sync.wire import quantize_stream

FP8 = torch.float8_e4m3fn


# --- the recorder ----------------------------------------------------------------------------------------------------


class Worker:
    """Live parameters and loaders of every form in vLLM."""

    def __init__(self) -> None:
        self.live = {
            "merged": torch.zeros(48, 64, dtype=torch.uint8).view(FP8),
            "columns": torch.zeros(16, 32, dtype=torch.uint8).view(FP8),
            "odd columns": torch.zeros(16, 5, dtype=torch.uint8).view(FP8),
            "cast": torch.zeros(16, dtype=torch.bfloat16),
            "padded": torch.full((12, 8), 7.0).bfloat16(),
            "halves": torch.zeros(2, 8, 16, dtype=torch.uint8),
            "number": torch.zeros(1, dtype=torch.bfloat16),
        }
        self.tensors = {name: SimpleNamespace(tensor=tensor, scales=None) for name, tensor in self.live.items()}
        self.copies = Copies(SimpleNamespace(tensors=lambda: self.tensors))
        self.loaded: list[str] = []

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.loaded.append(name)
        values = tensor.view(FP8) if tensor.dtype == torch.uint8 else tensor
        if name == "q and k":
            self.live["merged"].narrow(0, 0, 32).copy_(values[:32])
            self.live["merged"].narrow(0, 32, 8).copy_(values[32:40])
        elif name == "v":
            self.live["merged"].narrow(0, 40, 8).copy_(values.narrow(0, 8, 8))  # the second rank's rows
        elif name == "columns":
            self.live[name].copy_(values.narrow(1, 32, 32))
        elif name == "odd columns":
            self.live[name].copy_(values[:, 3:8])
        elif name == "padded":
            self.live[name][: len(tensor)].copy_(tensor)
            self.live[name][len(tensor) :].fill_(0)
        elif name == "halves":
            part = tensor.unflatten(1, (2, -1))[:, :, 4:8]
            self.live[name].unflatten(1, (2, -1)).copy_(part)
        elif name == "number":
            self.live[name].data.copy_(tensor.view(1))
        else:
            self.live[name].copy_(tensor)

    def sync(self, pieces: list[tuple[str, torch.Tensor]]) -> None:
        self.copies.start()
        _, others = self.copies.repeat(pieces)
        if others:
            with self.copies.recording(others):
                for piece in others:
                    self.load(*piece)
        self.copies.commit()


def wire(seed: int, offset: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Pieces in one buffer, as in verl's receiver, that begins ``offset`` bytes after a multiple of 16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q and k": ((40, 64), torch.uint8),
        "v": ((16, 64), torch.uint8),
        "columns": ((16, 64), torch.uint8),
        "odd columns": ((16, 9), torch.uint8),
        "cast": ((16,), torch.float32),
        "padded": ((9, 8), torch.bfloat16),
        "halves": ((2, 16, 16), torch.uint8),
        "number": ((), torch.bfloat16),
    }
    buffer = torch.empty(2**14 + offset, dtype=torch.uint8)[offset:]
    buffer.random_(generator=generator)
    pieces, start = [], 0
    for name, (shape, dtype) in shapes.items():
        values = torch.randn(shape, generator=generator).to(dtype) if dtype.is_floating_point else None
        size = torch.Size(shape).numel() * dtype.itemsize
        piece = buffer[start : start + size].view(dtype).view(shape)
        if values is not None:
            piece.copy_(values)
        pieces.append((name, piece))
        start += -(-size // 16) * 16
    return pieces


def bits(live: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: tensor.view(torch.uint8).flatten().tolist() for name, tensor in live.items()}


def expected(seed: int) -> dict[str, list]:
    worker = Worker()
    for piece in wire(seed):
        worker.load(*piece)
    return bits(worker.live)


def test_a_later_sync_repeats_copies_of_every_form_bit_for_bit():
    worker = Worker()
    worker.sync(wire(0))
    assert bits(worker.live) == expected(0) and len(worker.loaded) == 8
    for tensor in worker.live.values():
        tensor.view(torch.uint8).fill_(0x55)  # as after a sleep that discards the weights
    worker.sync(wire(1))
    assert len(worker.loaded) == 8, "nothing is loaded twice"
    assert bits(worker.live) == expected(1) != expected(0)


def test_rows_contiguous_on_both_sides_are_one_copy():
    worker = Worker()
    worker.sync(wire(0))
    pieces = {key[0]: piece for key, piece in worker.copies._known.items()}
    assert [len(target) for target in pieces["q and k"].targets] == [40 * 64 // 8]
    assert pieces["v"].sizes == [64, 64] and pieces["v"].taken == [1]
    assert pieces["columns"].parts[0].dtype == torch.int64 and pieces["odd columns"].parts[0].dtype == FP8


def test_adjacent_parameters_of_two_storages_are_two_copies():
    memory = bytearray(2 * 2**12)
    skipped = -(torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) % 16
    one, other = (torch.frombuffer(memory, dtype=torch.uint8, count=2048, offset=skipped + at) for at in (0, 2048))
    assert one.data_ptr() + one.nbytes == other.data_ptr()
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()

    class Neighbours(Worker):
        def __init__(self) -> None:
            super().__init__()
            self.live |= {"one": one, "other": other}
            self.tensors |= {name: SimpleNamespace(tensor=self.live[name], scales=None) for name in ("one", "other")}

        def load(self, name: str, tensor: torch.Tensor) -> None:
            self.loaded.append(name)
            one.copy_(tensor[:2048])
            other.copy_(tensor[2048:])

    worker = Neighbours()
    for fill in (1, 2):
        piece = torch.full((4096,), fill, dtype=torch.uint8)
        worker.sync([("both", piece)])
        assert bytes(memory[skipped : skipped + 4096]) == bytes([fill]) * 4096
    assert worker.loaded == ["both"], "the second sync repeats the copies"


def test_pieces_at_odd_addresses_are_loaded():
    worker = Worker()
    worker.sync(wire(0))
    worker.sync(wire(1, offset=4))
    assert bits(worker.live) == expected(1) and len(worker.loaded) == 16


def test_a_piece_of_another_shape_is_loaded():
    worker = Worker()
    worker.sync(wire(0))
    pieces = [(name, tensor[:8] if name == "padded" else tensor) for name, tensor in wire(1)]
    worker.sync(pieces)
    assert worker.loaded[8:] == ["padded"]
    assert worker.live["padded"][8:].count_nonzero() == 0


def test_everything_is_loaded_after_a_parameter_moved_or_a_sync_failed():
    worker = Worker()
    worker.sync(wire(0))
    worker.tensors = dict(worker.tensors)  # as a map that is built again
    worker.sync(wire(1))
    assert len(worker.loaded) == 16 and bits(worker.live) == expected(1)
    worker.copies.start()
    worker.copies.repeat(wire(2))  # and then the sync fails
    worker.sync(wire(3))
    assert len(worker.loaded) == 24 and bits(worker.live) == expected(3)


@pytest.mark.parametrize(
    "load",
    [
        lambda live, tensor: live["cast"].copy_(tensor * 2),
        lambda live, tensor: live["cast"].copy_(tensor.flip(0).contiguous()),
        lambda live, tensor: live["cast"].copy_(tensor).mul_(2),
        lambda live, tensor: live["cast"].fill_(tensor[0].item()),
        lambda live, tensor: torch.empty(16).copy_(tensor),
        lambda live, tensor: (live["cast"].copy_(tensor), live["cast"][:2].copy_(tensor[2:4])),
        lambda live, tensor: live["cast"].copy_(tensor[:1]),
    ],
    ids=["product", "reversed", "in place", "number", "elsewhere", "twice", "broadcast"],
)
def test_what_is_not_a_plain_copy_into_a_parameter_is_loaded_each_time(monkeypatch, load):
    worker = Worker()
    monkeypatch.setattr(worker, "load", lambda name, tensor: worker.loaded.append(name) or load(worker.live, tensor))
    for seed in range(3):
        worker.sync([piece for piece in wire(seed) if piece[0] == "cast"])
    assert worker.loaded == ["cast"] * 3


# --- a real engine ---------------------------------------------------------------------------------------------------

RULE = "fp32"


@pytest.fixture(scope="module")
def worker(tmp_path_factory, cpu_platform):
    """vLLM's worker on a model with biases on q, k and v and a tied head."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", 0, vocab_size=96, tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(folder)
    options = JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule=RULE)
    with vllm_engine.cpu_settings():
        _, worker = vllm_engine.start(folder, options, load_format="dummy")
        yield worker


def stream(seed: int):
    """An actor's stream: matrices of one width in stacks, and a head tied to the embedding."""
    model = tiny_model("qwen2", seed, vocab_size=96, tie_word_embeddings=True)
    state, plans = model.state_dict(), plan_linears(model.config)
    groups = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),)
    groups += (("self_attn.o_proj",), ("mlp.down_proj",))

    def weights():
        names = [[f"model.layers.{i}.{name}.weight" for i in range(2) for name in group] for group in groups]
        names.append([name for name in state if name.endswith((".bias", "norm.weight"))])
        for group in names:
            yield Stack(tuple(group), tuple(len(state[name]) for name in group)), torch.cat([state[n] for n in group])
        yield "model.embed_tokens.weight", state["model.embed_tokens.weight"]

    probe = formats.get("fp8").probe(torch.device("cpu"), RULE)
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    return with_contract(quantize_stream(weights(), plans, RULE), scale_rule=RULE, probe=probe, tied=tied)


def parameters(worker) -> dict[str, torch.Tensor]:
    return {
        name: parameter.data.as_subclass(torch.Tensor).view(torch.uint8).clone()
        for name, parameter in worker.model_runner.model.named_parameters()
    }


@pytest.fixture
def loads(worker, monkeypatch) -> list[int]:
    """Number of names in each call of vLLM's loaders."""
    calls, stock = [], worker.model_runner.model.load_weights

    def load_weights(weights):
        weights = list(weights)
        calls.append(len(weights))
        return stock(weights)

    monkeypatch.setattr(worker.model_runner.model, "load_weights", load_weights)
    return calls


def test_the_second_sync_calls_no_loader_and_leaves_the_same_bits(worker, loads):
    vllm_engine.sync(worker, stream(1))
    assert sum(loads) == 2 * 7 + 2 * 5 + 1 + 1, "weights, two norms and three biases a layer, last norm, embedding"
    loads.clear()
    for parameter in worker.model_runner.model.parameters():
        parameter.data.as_subclass(torch.Tensor).view(torch.uint8).fill_(0x55)
    vllm_engine.sync(worker, stream(2))
    assert loads == []
    repeated = parameters(worker)
    worker._jetrl_copies._known.clear()
    vllm_engine.sync(worker, stream(2))
    assert sum(loads) == 26
    loaded = parameters(worker)
    assert all(torch.equal(bits, loaded[name]) for name, bits in repeated.items())


def test_a_copy_to_a_wrong_place_is_detected_and_the_next_sync_loads(worker, loads):
    vllm_engine.sync(worker, stream(3))
    vllm_engine.sync(worker, stream(3))
    piece = next(piece for piece in worker._jetrl_copies._known.values() if len(piece.targets) > 3)
    sizes = [len(target) for target in piece.targets]
    one, other = next((i, j) for i in range(len(sizes)) for j in range(i) if sizes[i] == sizes[j])
    piece.targets[one], piece.targets[other] = piece.targets[other], piece.targets[one]
    with pytest.raises(ContractViolation, match="differs between trainer and rollout"):
        vllm_engine.sync(worker, stream(3))
    loads.clear()
    vllm_engine.sync(worker, stream(3))
    assert sum(loads) == 26


def test_a_wrong_map_of_live_parameters_is_detected_at_every_sync(worker, monkeypatch):
    vllm_engine.sync(worker, stream(4))
    stock = live_module.live_tensors

    def swapped(model):
        tensors = stock(model)
        k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
        return tensors | {k: tensors[v], v: tensors[k]}

    for repeats in (True, False):
        worker._jetrl_live._tensors = swapped(worker.model_runner.model)
        if repeats:
            worker._jetrl_copies._tensors = worker._jetrl_live._tensors
        with pytest.raises(ContractViolation, match=r"layers\.1\.self_attn\.k_proj\.weight differs"):
            vllm_engine.sync(worker, stream(4))
    worker._jetrl_live._places = []


def test_a_parameter_that_moved_is_loaded_at_its_new_address(worker, loads):
    vllm_engine.sync(worker, stream(5))
    loads.clear()
    weight = worker.model_runner.model.model.layers[1].mlp.down_proj.weight
    before = weight.data
    weight.data = torch.zeros_like(before)
    vllm_engine.sync(worker, stream(6))
    assert sum(loads) == 26 and not torch.equal(before.view(torch.uint8), weight.data.view(torch.uint8))
    loads.clear()
    vllm_engine.sync(worker, stream(6))
    assert loads == []
