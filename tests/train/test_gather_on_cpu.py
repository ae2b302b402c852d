# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A weight sync's gather gives what verl's gives, cast to BF16, and a layer's matrices below each other."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from two_processes import WORLD, run_in_two_processes

from jetrl_verl.sync.stacks import continues
from jetrl_verl.sync.stacks import joined as one_matrix
from jetrl_verl.sync.wire import SyncStatistics
from jetrl_verl.train.gather import gathered

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Rows that two ranks share evenly, unevenly, and of which the second rank has none."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(128, rows) for rows in (256, 128, 128))
        self.odd = nn.Linear(128, 131, bias=False)
        self.one = nn.Linear(7, 1)
        self.norm = nn.Parameter(torch.randn(129))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("steps", torch.arange(5))
        self.register_buffer("table", torch.randn(3))


def sharded(mesh) -> Model:
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def as_verl_sends(params) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach() if isinstance(p, DTensor) else p for name, p in params.items()}


def check(mesh) -> dict[str, torch.Tensor]:
    params, statistics = sharded(mesh).state_dict(keep_vars=True), SyncStatistics()
    expected = as_verl_sends(params)
    found = dict(gathered(params, CPU, statistics))
    assert list(found) == list(expected)
    assert statistics.stock_bytes == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in found.items():
        assert not tensor.requires_grad
        whole = expected[name].bfloat16() if isinstance(params[name], DTensor) else expected[name]
        assert tensor.dtype == whole.dtype and torch.equal(tensor, whole), name
    for layer in ("layers.0", "layers.1"):
        q, k, v = (found[f"{layer}.{name}.weight"] for name in "qkv")
        assert continues(q, k) and continues(k, v)
        assert torch.equal(one_matrix([q, k, v]), torch.cat([q, k, v]))
        vectors = {found[f"{layer}.{name}"].untyped_storage().data_ptr() for name in ("norm", "q.bias")}
        assert len(vectors) == 1 and q.untyped_storage().data_ptr() not in vectors
    return found


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on_two_ranks(rank: int) -> None:
    found = check(init_device_mesh("cpu", (WORLD,)))
    replicas = check(init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicas", "shards")))
    assert all(torch.equal(tensor, replicas[name]) for name, tensor in found.items())
    dist.barrier()


def test_two_ranks_gather_what_verl_gathers():
    run_in_two_processes(on_two_ranks)


def test_one_rank_needs_no_gather(one_process_group, monkeypatch):
    monkeypatch.setattr(dist, "all_gather_into_tensor", None)
    check(init_device_mesh("cpu", (1,)))


def test_another_form_comes_as_verl_sends_it(one_process_group):
    mesh = init_device_mesh("cpu", (1,))
    whole = {"a": distribute_tensor(torch.randn(4, 4), mesh, [Replicate()]), "b": torch.randn(3)}
    found = dict(gathered(whole, CPU, SyncStatistics()))
    assert found["a"].dtype == torch.float32 and torch.equal(found["a"], whole["a"].full_tensor())
    assert found["b"].dtype == torch.float32


def test_a_norm_does_not_keep_its_layers_matrices(one_process_group):
    params = sharded(init_device_mesh("cpu", (1,))).state_dict(keep_vars=True)
    norms, matrices = [], []
    for name, tensor in gathered(params, CPU, SyncStatistics()):
        if name.endswith("norm"):
            norms.append(tensor)
        elif name.endswith("q.weight"):
            matrices.append(weakref.ref(tensor))
        del tensor
    assert len(norms) == 2 and all(matrix() is None for matrix in matrices)


@pytest.mark.parametrize(
    "below",
    [
        lambda q, rest: rest[128:],  # a gap
        lambda q, rest: rest[:128, :64],  # other columns
        lambda q, rest: rest[:128].clone(),
        lambda q, rest: rest[:128].view(torch.int16),
        lambda q, rest: rest[0],
        lambda q, rest: q,
    ],
)
def test_what_does_not_lie_right_below_is_not_joined(below):
    storage = torch.randn(512, 128, dtype=torch.bfloat16)
    q, rest = storage[:128], storage[128:]
    assert continues(q, rest[:128])
    assert not continues(q, below(q, rest))
