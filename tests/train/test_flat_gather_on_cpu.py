# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gather of FSDP1's flat vectors gives its state dict cast to BF16, however ranks cut the vectors."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from streams import unstacked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from two_processes import WORLD, in_two_processes

from jetrl_verl.sync.stacks import Stack
from jetrl_verl.sync.wire import SyncStatistics
from jetrl_verl.train import flat_gather
from jetrl_verl.train.flat_gather import FlatGather

pytestmark = pytest.mark.usefixtures("cpu_platform")
CPU = torch.device("cpu")


class Layer(nn.Module):
    """Two ranks cut these parameters within a row and within a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(7, rows) for rows in (12, 5))
        self.down = nn.Linear(3, 131, bias=False)
        self.norm = nn.Parameter(torch.randn(129))

    def forward(self, h):
        return h + (self.q(h) + self.norm[:12]).sum(-1, keepdim=True) + self.k(h).sum() + self.down.weight.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 7)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.Parameter(torch.randn(7))
        self.head = nn.Linear(7, 33, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)

    def forward(self, rows):
        h = self.embed(rows) + self.norm
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def wrapped(mesh, use_orig_params: bool, strategy=ShardingStrategy.FULL_SHARD) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        Model(),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        device_mesh=mesh,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        device_id=CPU,
    )


def expected(module) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(
            module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
        ):
            params = module.state_dict()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in params.items()}


def check(module) -> None:
    gathers = FlatGather(module)
    for step in range(2):
        whole, statistics = expected(module), SyncStatistics()
        items = [(name, tensor.clone()) for name, tensor in gathers.stream(CPU, statistics)]
        tensors = dict(unstacked(items))
        assert tensors.keys() == whole.keys() and "hidden" not in tensors
        assert statistics.stock_bytes == sum(tensor.nbytes for tensor in whole.values())
        for name, tensor in tensors.items():
            value = whole[name] if name == "table" else whole[name].bfloat16()
            assert tensor.dtype == value.dtype and torch.equal(tensor, value), (step, name)
        stacks = [name.names for name, _ in items if isinstance(name, Stack)]
        assert tuple(f"layers.{i}.{name}.weight" for i in range(3) for name in "qk") in stacks
        # A step exchanges the vector for FSDP's compute copy and back.
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        module(torch.arange(5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            module(torch.arange(5))  # after which SHARD_GRAD_OP keeps whole vectors
    tied = FlatGather(module, tied=True)
    left = {name: tensor.clone() for name, tensor in unstacked(tied.stream(CPU, SyncStatistics()))}
    assert tied.tied == {"head.weight": "embed.weight"} and left.keys() == tensors.keys() - {"head.weight"}
    whole = expected(module)
    assert all(torch.equal(tensor, whole[name].to(tensor.dtype)) for name, tensor in left.items())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@in_two_processes
def test_two_ranks_gather_the_state_dict(rank):
    for use_orig_params in (False, True):
        check(wrapped(init_device_mesh("cpu", (WORLD,)), use_orig_params))
    check(wrapped(init_device_mesh("cpu", (WORLD,)), False, ShardingStrategy.SHARD_GRAD_OP))
    flat_gather.TOGETHER_BYTES = 0
    module = wrapped(init_device_mesh("cpu", (WORLD,)), False)
    names = [name for name, _ in FlatGather(module).stream(CPU, SyncStatistics())]
    assert sum(isinstance(name, Stack) and name.names[0].endswith("q.weight") for name in names) == 3
    renamed = FlatGather(module, sent_as=functools.partial("model.{}".format)).stream(CPU, SyncStatistics())
    assert all(name.startswith("model.") for name, _ in unstacked(renamed))
    # A whole unit and a part of the root's are not sent.
    dropped, statistics = ("layers.1.", "norm"), SyncStatistics()
    fewer = FlatGather(module, sent_as=lambda name: "" if name.startswith(dropped) else name)
    left = {name: tensor.clone() for name, tensor in unstacked(fewer.stream(CPU, statistics))}
    whole = {name: tensor for name, tensor in expected(module).items() if not name.startswith(dropped)}
    assert left.keys() == whole.keys() and statistics.stock_bytes == sum(tensor.nbytes for tensor in whole.values())
    assert all(torch.equal(tensor, whole[name].to(tensor.dtype)) for name, tensor in left.items())
    dist.barrier()
