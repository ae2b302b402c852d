# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How a rollout over several ranks sums their products, with vLLM's own collectives in processes joined by gloo."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from two_processes import run_in_processes

from jetrl_verl import kernels
from jetrl_verl.kernels.sum_of_ranks import products_of_ranks
from jetrl_verl.sync.operations_probe import stated_reduction


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_another_order_changes_bits_in_each_shape_of_the_probe(ranks):
    for products in products_of_ranks(torch.device("cpu"), ranks):
        expected = kernels.sum_of_ranks(products)
        assert expected.isfinite().all()
        for first in range(1, ranks):
            turned = products[first:] + products[:first]
            assert not torch.equal(kernels.sum_of_ranks(turned), expected), first
        in_bf16 = products[0].clone()
        for part in products[1:]:
            in_bf16 += part
        assert not torch.equal(in_bf16, expected), "one rounding, not one for each rank"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_truncating_the_sum_instead_of_rounding_changes_bits(ranks):
    """As vLLM's all-reduce in shared memory does on a CPU without BF16 instructions."""
    for products in products_of_ranks(torch.device("cpu"), ranks):
        exact = torch.stack(products).double().sum(dim=0).float()
        truncated = (exact.view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()
        assert not torch.equal(truncated, kernels.sum_of_ranks(products))


def test_the_order_of_two_ranks_does_not_matter():
    for a, b in products_of_ranks(torch.device("cpu"), 2):
        assert torch.equal(kernels.sum_of_ranks([a, b]), kernels.sum_of_ranks([b, a]))
        assert torch.equal(kernels.sum_of_ranks([a, b]), a + b)


def test_a_rollout_that_adds_in_another_order_states_other_sums():
    device = torch.device("cpu")
    assert stated_reduction(device, 1) == {}
    stated = stated_reduction(device, 4)
    assert stated == stated_reduction(device, 4) and list(stated) == ["the sum of 4 ranks' products"]
    assert stated_reduction(device, 4, lambda parts: kernels.sum_of_ranks(parts[::-1])) != stated


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextmanager
def vllm_group(rank: int, ranks: int, port: int) -> Iterator[None]:
    """vLLM's process groups of an engine over ``ranks``, by gloo."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    # A different name on each rank turns off vLLM's shared-memory communicator, whose ranks wait in busy loops.
    os.environ["VLLM_DIST_IDENT"] = f"{port}-{rank}"
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(ranks)
        yield
        torch.distributed.barrier()
    cleanup_dist_env_and_memory()


def in_vllms_group(rank: int, world: int, port: int, check) -> None:
    with vllm_group(rank, world, port):
        check(rank, world)


def reductions(rank: int, world: int) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    from jetrl_verl.rollout import row_parallel

    for products in products_of_ranks(torch.device("cpu"), world):
        expected = kernels.sum_of_ranks(products)
        assert torch.equal(row_parallel.reduce_ranks(products[rank]), expected)
        for path in (row_parallel._gathered, row_parallel._by_rows):
            total = path(products[rank])
            assert total.shape == expected.shape and torch.equal(total, expected), path
    assert stated_reduction(torch.device("cpu"), world, lambda parts: row_parallel.reduce_ranks(parts[rank])) == (
        stated_reduction(torch.device("cpu"), world)
    )

    # A layer of vLLM's with a bias, which rank 0 alone adds.
    torch.manual_seed(0)
    layer = RowParallelLinear(256 * world, 128, bias=True, params_dtype=torch.bfloat16, prefix="down")
    weight, bias = torch.randn(128, 256 * world).bfloat16(), torch.randn(128).bfloat16()
    layer.weight.data.copy_(weight[:, 256 * rank : 256 * (rank + 1)])
    layer.bias.data.copy_(bias)
    # vLLM's method packs the weight for its CPU kernels.
    layer.quant_method.apply = lambda module, x, bias: torch.nn.functional.linear(x, module.weight, bias)
    for _ in range(2):  # verl's syncs call it again
        row_parallel.order_reduction(layer)
    assert type(layer) is row_parallel.OrderedRowParallelLinear
    assert row_parallel.stock_all_reduce_matches(2, on_gpu=True)
    assert not row_parallel.stock_all_reduce_matches(3, on_gpu=True)
    x = torch.randn(5, 256 * world).bfloat16()
    parts = [
        torch.nn.functional.linear(
            x[:, 256 * r : 256 * (r + 1)], weight[:, 256 * r : 256 * (r + 1)], bias if r == 0 else None
        )
        for r in range(world)
    ]
    part, expected = x[:, 256 * rank : 256 * (rank + 1)], kernels.sum_of_ranks(parts)
    total, returned_bias = layer(part)
    assert returned_bias is None and torch.equal(total, expected)

    # In the graph of vLLM's passes it is one operator that they do not match.
    called = []

    def keep(module, inputs):
        called.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    compiled = torch.compile(lambda x: layer(x)[0], backend=keep, fullgraph=True)
    assert torch.equal(compiled(part), expected)
    assert [name for name in called if "reduce" in name or "gather" in name] == ["jetrl.ordered_all_reduce"]


class CustomAllReduce:
    """Instead of vLLM's custom kernel, which a CPU does not have: accepts up to ``most`` rows and adds in the order of
    the ranks, but in reverse on rank ``other``."""

    disabled = False

    def __init__(self, most: int, other: int | None = None) -> None:
        self.most, self.other, self.taken = most, other, 0

    def custom_all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        from vllm.distributed import get_tp_group

        if x.shape[0] > self.most:
            return None
        self.taken += 1
        group = get_tp_group()
        parts = list(group.all_gather(x, 0).unflatten(0, (group.world_size, -1)).unbind(0))
        return kernels.sum_of_ranks(parts[::-1] if group.rank_in_group == self.other else parts)


def one_stage(rank: int, world: int) -> None:
    from vllm.distributed import get_tp_group

    from jetrl_verl.rollout import row_parallel

    communicator, cpu = get_tp_group().device_communicator, torch.device("cpu")
    cases = [(products[rank], kernels.sum_of_ranks(products)) for products in products_of_ranks(cpu, world)]
    assert not row_parallel.find_one_stage(cpu)
    for custom, ordered in ((CustomAllReduce(100), True), (CustomAllReduce(100, other=1), False)):
        communicator.ca_comm = custom
        assert row_parallel.find_one_stage(cpu) == ordered, "one rank with other bits is enough for all"
        assert os.environ.get(row_parallel.ALGORITHM) == ("1stage" if ordered else None)
        os.environ.pop(row_parallel.ALGORITHM, None)
        custom.taken = 0
        for product, expected in cases:
            assert torch.equal(row_parallel.ordered_all_reduce(product), expected)
        small = sum(product.shape[0] <= 100 for product, _ in cases)
        assert 0 < small < len(cases) and custom.taken == (small if ordered else 0)
    os.environ[row_parallel.ALGORITHM] = "2stage"
    row_parallel.find_one_stage(cpu)
    assert os.environ.pop(row_parallel.ALGORITHM) == "2stage", "the user's setting stays"
    # A kernel that was not probed is not used.
    communicator.ca_comm = CustomAllReduce(100)
    assert torch.equal(row_parallel.ordered_all_reduce(cases[0][0]), cases[0][1]) and not communicator.ca_comm.taken


def test_vllms_custom_kernel_is_used_only_if_its_bits_match():
    world = 3
    run_in_processes(world, in_vllms_group, world, free_port(), one_stage)


def test_vllms_ranks_add_in_the_trainers_order():
    """Always three ranks: vLLM remembers a group's size, and processes are reused. Two run end to end."""
    world = 3
    run_in_processes(world, in_vllms_group, world, free_port(), reductions)
