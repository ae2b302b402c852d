# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A weight sync's gather gives verl's tensors cast to BF16, with matrices of one width stacked."""

import gc
import weakref

import torch
import torch.distributed as dist
from streams import unstacked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from two_processes import WORLD, in_two_processes

from jetrl_verl.sync.stacks import Stack, names_of
from jetrl_verl.sync.wire import SyncStatistics
from jetrl_verl.train import gather
from jetrl_verl.train.gather import Gather

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Rows that two ranks share evenly or unevenly, and a row that the second rank has none of."""

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


def check(mesh, gathers: Gather | None = None) -> dict[str, torch.Tensor]:
    params, statistics = sharded(mesh).state_dict(keep_vars=True), SyncStatistics()
    expected = as_verl_sends(params)
    items = list((gathers or Gather()).stream(params, CPU, statistics))
    tensors = dict(unstacked(items))
    assert tensors.keys() == expected.keys()
    assert statistics.stock_bytes == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in tensors.items():
        assert not tensor.requires_grad
        whole = expected[name].bfloat16() if isinstance(params[name], DTensor) else expected[name]
        assert tensor.dtype == whole.dtype and torch.equal(tensor, whole), name
    stacks = [name.names for name, _ in items if isinstance(name, Stack)]
    layers = ("layers.0", "layers.1")
    assert tuple(f"{layer}.{name}.weight" for layer in layers for name in ("q", "k", "v", "odd")) in stacks
    assert tuple(f"{layer}.one.weight" for layer in layers) in stacks
    vectors = [item for item in items if names_of(item[0])[0] == "layers.0.norm"]
    assert [name.names for name, _ in vectors] == [names for names in stacks if "layers.1.norm" in names]
    return tensors


@in_two_processes
def test_two_ranks_gather_what_verl_gathers(rank):
    shards = check(init_device_mesh("cpu", (WORLD,)))
    replicas = check(init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicas", "shards")))
    assert all(torch.equal(tensor, replicas[name]) for name, tensor in shards.items())
    dist.barrier()


def test_one_rank_needs_no_gather(one_process_group, monkeypatch):
    monkeypatch.setattr(dist, "all_gather_into_tensor", None)
    check(init_device_mesh("cpu", (1,)))


def test_tensors_of_other_placements_are_sent_as_by_verl(one_process_group):
    mesh = init_device_mesh("cpu", (1,))
    whole = {"a": distribute_tensor(torch.randn(4, 4), mesh, [Replicate()]), "b": torch.randn(3)}
    sent = dict(Gather().stream(whole, CPU, SyncStatistics()))
    assert sent["a"].dtype == torch.float32 and torch.equal(sent["a"], whole["a"].full_tensor())
    assert sent["b"].dtype == torch.float32


def test_a_norms_tensor_does_not_keep_matrices_alive(one_process_group, monkeypatch):
    monkeypatch.setattr(gather, "TOGETHER_BYTES", 0)
    params = sharded(init_device_mesh("cpu", (1,))).state_dict(keep_vars=True)
    norms, matrices = [], []
    for name, tensor in Gather().stream(params, CPU, SyncStatistics()):
        if tensor.ndim == 1:
            norms.append(tensor)
        elif names_of(name)[0].startswith("layers."):
            matrices.append(weakref.ref(tensor))
        del tensor
    assert len(norms) == 4 and len(matrices) == 4 and all(matrix() is None for matrix in matrices)


def test_layers_are_gathered_together_up_to_a_limit(one_process_group, monkeypatch):
    params = sharded(init_device_mesh("cpu", (1,))).state_dict(keep_vars=True)
    of_a_layer = sum(2 * tensor.numel() for name, tensor in params.items() if name.startswith("layers.0."))

    def stacks_of_q(limit: int) -> int:
        monkeypatch.setattr(gather, "TOGETHER_BYTES", limit)
        names = [names_of(name) for name, _ in Gather().stream(params, CPU, SyncStatistics())]
        return sum(any(name.endswith("q.weight") for name in stack) for stack in names)

    assert (stacks_of_q(2 * of_a_layer), stacks_of_q(2 * of_a_layer - 1), stacks_of_q(0)) == (1, 2, 2)


def test_excluded_weights_have_stacks_of_their_own(one_process_group):
    params = sharded(init_device_mesh("cpu", (1,))).state_dict(keep_vars=True)
    stream = Gather(lambda name: name.endswith("v.weight")).stream(params, CPU, SyncStatistics())
    stacks = [name.names for name, _ in stream if isinstance(name, Stack)]
    assert ("layers.0.v.weight", "layers.1.v.weight") in stacks
    of_q = next(names for names in stacks if "layers.0.q.weight" in names)
    assert "layers.0.k.weight" in of_q and "layers.0.v.weight" not in of_q


def test_stacks_are_kept_between_syncs_and_rebuilt_for_other_parameters(one_process_group):
    gathers, mesh = Gather(), init_device_mesh("cpu", (1,))
    params = sharded(mesh).state_dict(keep_vars=True)

    def stacks(params) -> list[Stack]:
        return [name for name, _ in gathers.stream(params, CPU, SyncStatistics()) if isinstance(name, Stack)]

    first = stacks(params)
    assert all(one is other for one, other in zip(first, stacks(params), strict=True))
    with torch.no_grad():
        params["layers.0.norm"].to_local().fill_(3.0)
    tensors = dict(unstacked(gathers.stream(params, CPU, SyncStatistics())))
    assert (tensors["layers.0.norm"] == 3).all(), "stale weights"
    narrower = params | {"layers.0.norm": distribute_tensor(torch.randn(64), mesh, [Shard(0)])}
    assert len(dict(unstacked(gathers.stream(narrower, CPU, SyncStatistics())))["layers.0.norm"]) == 64
    params.pop("layers.1.odd.weight")
    assert stacks(params) != first and "layers.1.odd.weight" not in dict(
        unstacked(gathers.stream(params, CPU, SyncStatistics()))
    )
    check(mesh, gathers)
    references = [weakref.ref(tensor) for tensor in params.values()]
    stacks(params)
    del params, tensors, narrower
    gc.collect()
    assert all(reference() is None for reference in references), "freed parameters are kept alive"


def test_a_model_may_be_offloaded_between_syncs(one_process_group):
    """Moving sharded parameters swaps tensors, which torch refuses if we hold references to them."""
    model, gathers = sharded(init_device_mesh("cpu", (1,))), Gather()
    before = dict(unstacked(gathers.stream(model.state_dict(keep_vars=True), CPU, SyncStatistics())))
    model.to("cpu", non_blocking=True)
    after = dict(unstacked(gathers.stream(model.state_dict(keep_vars=True), CPU, SyncStatistics())))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_tied_parameter_is_sent_once_if_the_rollout_ties_it_too(one_process_group):
    params = dict(sharded(init_device_mesh("cpu", (1,))).state_dict(keep_vars=True))
    params["head"] = params["embed.weight"]
    gathers, statistics = Gather(tied=True), SyncStatistics()
    tensors = dict(unstacked(gathers.stream(params, CPU, statistics)))
    assert "head" not in tensors and gathers.tied == {"head": "embed.weight"}
    assert statistics.stock_bytes == sum(tensor.nbytes for tensor in as_verl_sends(params).values())
    gathers = Gather()
    assert "head" in dict(unstacked(gathers.stream(params, CPU, SyncStatistics()))) and gathers.tied == {}
