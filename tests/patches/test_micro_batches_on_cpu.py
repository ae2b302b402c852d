# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Micro-batches are those of verl's release, without the columns that the pass does not read."""

import functools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from patch_home import current, home, released
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jetrl_verl.patches.equal_lengths import EQUAL_LENGTHS
from jetrl_verl.patches.micro_batches import COLUMNS, SELECT

LENGTHS = (5, 1, 7, 3, 3, 2)


def jagged(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sequences of ``LENGTHS`` tokens with ``shape`` numbers a token."""
    generator = torch.Generator().manual_seed(len(shape))
    rows = [torch.randint(0, 99, (length, *shape), generator=generator).to(dtype) for length in LENGTHS]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def of_three_axes() -> torch.Tensor:
    """Positions ``[axes, tokens]`` as a policy for images has them."""
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    return nested_tensor_from_tensor_list([torch.arange(3 * n).view(3, n) for n in LENGTHS], ragged_idx=2)


def batch() -> TensorDict:
    columns = {
        "input_ids": jagged(dtype=torch.int64),
        "loss_mask": jagged(dtype=torch.bool),
        "advantages": jagged(),
        "rm_scores": jagged(),
        "routed_experts": jagged(2, 4, dtype=torch.int16),
        "position_ids": of_three_axes(),
        "suffixes": torch.nested.narrow(
            torch.arange(48).view(6, 8), 1, torch.tensor(LENGTHS) * 0 + 1, torch.tensor(LENGTHS), layout=torch.jagged
        ),
        "scores": torch.arange(3 * len(LENGTHS)).view(-1, 3),
        "multi_modal_inputs": NonTensorStack(*({"pixels": torch.full((2,), n)} for n in LENGTHS)),
        "raw_prompt": NonTensorStack(*([{"role": "user", "content": str(n)}] for n in LENGTHS)),
        "uid": NonTensorStack(*"ababab"),
        "temperature": NonTensorData(0.7),
    }
    return TensorDict(columns, batch_size=len(LENGTHS))


def check_equal(actual: TensorDict, expected: TensorDict) -> None:
    assert set(actual.keys()) == set(expected.keys()) and actual.batch_size == expected.batch_size
    for name, column in expected.items():
        other = actual.get(name)
        assert type(other) is type(column), name
        if not isinstance(column, torch.Tensor):
            assert str(other.tolist()) == str(column.tolist()) and other.batch_size == column.batch_size, name
        elif column.is_nested:
            assert other._ragged_idx == column._ragged_idx and other.lengths() is column.lengths() is None
            assert (other._get_max_seqlen(), other._get_min_seqlen()) == (
                column._get_max_seqlen(),
                column._get_min_seqlen(),
            )
            for part, stock in ((other.values(), column.values()), (other.offsets(), column.offsets())):
                assert part.dtype == stock.dtype and torch.equal(part, stock), name
        else:
            assert torch.equal(other, column), name


@pytest.mark.parametrize("indices", [[3], [5, 0, 2], [1, 1, -1], torch.tensor([4, 3]), list(range(6))], ids=str)
def test_rows_are_those_of_the_release(indices):
    home(SELECT)
    check_equal(current(SELECT)(batch(), indices), released(SELECT)(batch(), indices))


def test_of_no_batch_there_are_no_rows():
    home(SELECT)
    assert current(SELECT)(None, [0]) is None
    with pytest.raises(IndexError):
        current(SELECT)(batch(), [6])


@pytest.fixture
def micro_batches(cpu_platform, tmp_path, monkeypatch):
    """Callable: what verl's ``forward_step`` receives of :func:`batch` with a loss."""
    from verl.workers.engine.fsdp import transformer_impl

    home(COLUMNS)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    seen = []

    def forward_step(micro_batch, loss_function, forward_only):
        seen.append(micro_batch)
        return torch.tensor(1.0), {"loss": 1.0, "metrics": {}}

    engine = SimpleNamespace(
        forward_step=forward_step,
        ulysses_sequence_parallel_size=1,
        get_data_parallel_group=lambda: None,
        get_data_parallel_size=lambda: 1,
        scaler=None,
    )
    for name in ("forward_backward_batch", "_stock_forward_backward_batch"):  # the latter in a patched checkout
        if (function := getattr(transformer_impl.FSDPEngine, name, None)) is not None:
            setattr(engine, name, partial(function, engine))

    def run(loss_function) -> list[TensorDict]:
        data = batch()
        data["use_dynamic_bsz"], data["max_token_len_per_gpu"] = NonTensorData(True), NonTensorData(9)
        engine.forward_backward_batch(data, loss_function, forward_only=True)
        return seen

    yield run
    dist.destroy_process_group()


LOSSES = ["none", "verl's", "a user's around it"]


@pytest.mark.parametrize("loss", LOSSES)
def test_columns_that_a_pass_does_not_read_are_cut_for_a_users_loss_alone(micro_batches, loss):
    from verl.workers.utils.losses import ppo_loss

    @functools.wraps(ppo_loss)
    def own_loss(**arguments):
        return ppo_loss(**arguments)

    functions = dict(zip(LOSSES, (None, partial(ppo_loss, config=None), partial(own_loss, config=None)), strict=True))
    for micro_batch in (steps := micro_batches(functions[loss])):
        own = loss == LOSSES[-1]
        assert [name in micro_batch for name in ("raw_prompt", "uid", "rm_scores")] == [own] * 3
        assert ("advantages" in micro_batch) == (loss != "none")
        assert micro_batch["temperature"] == 0.7 and len(micro_batch["multi_modal_inputs"]) == len(micro_batch)
        assert {"input_ids", "position_ids", "loss_mask", "routed_experts"} <= set(micro_batch.keys())
    assert sum(micro_batch["input_ids"].values().numel() for micro_batch in steps) == sum(LENGTHS)


@pytest.mark.parametrize("lengths", [(7,), (4,), (7, 7), (8, 8), (7, 5), (2, 2), (1, 3)], ids=str)
def test_positions_of_mrope_keep_their_rows_in_sequences_of_one_length(lengths):
    from verl.utils.tensordict_utils import index_select_tensor_dict

    home(EQUAL_LENGTHS)
    sequences = [torch.arange(4 * length).view(4, length) for length in lengths]
    nested = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    batch = TensorDict({"position_ids": nested}, batch_size=[len(lengths)])
    for _ in range(2):  # verl calls it for a batch and again for each mini-batch
        current(EQUAL_LENGTHS)(batch)
        batch = index_select_tensor_dict(batch, [*range(len(lengths))])
    assert torch.equal(batch["position_ids"].values(), torch.cat(sequences, dim=1))
