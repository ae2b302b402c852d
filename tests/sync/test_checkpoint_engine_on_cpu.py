# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of a trainer arrive unchanged at rollouts on GPUs of their own; a thread is a process of verl's job."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread

import pytest
import torch

from jetrl_verl.sync import checkpoint_engine
from jetrl_verl.sync.checkpoint_engine import JetCheckpointEngine, WeightSyncError

TRAINER = 2
BUCKET = 2**20


def tensors(seed: int) -> list[tuple[str, torch.Tensor]]:
    """As wire.py and verl send them: several types, odd lengths, strided, a parameter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ("qdata", torch.randn(130, 128, generator=generator).to(torch.float8_e4m3fn)),
        ("jetrl:[1]", torch.arange(13 + seed, dtype=torch.uint8)),
        ("sums", torch.randint(-(2**62), 2**62, (7,), generator=generator)),
        ("a number", torch.tensor(2.5 + seed)),
        ("transposed", torch.randn(3, 5, generator=generator).bfloat16().t()),
        ("parameter", torch.nn.Parameter(torch.randn(300, 70, generator=generator))),
    ]


class Job:
    """A trainer of two ranks and a rollout of some; calls their engines as verl's manager does."""

    def __init__(self, rollout: int) -> None:
        self.trainer = [JetCheckpointEngine(BUCKET, is_master=rank == 0) for rank in range(TRAINER)]
        self.rollout = [JetCheckpointEngine(BUCKET) for _ in range(rollout)]

    def each(self, *calls: Callable) -> list:
        """The results of calls that run at the same time; raises the first failure without waiting for the others."""
        ended: SimpleQueue = SimpleQueue()

        def run(place: int, call: Callable) -> None:
            try:
                ended.put((place, call(), None))
            except Exception as error:
                ended.put((place, None, error))

        for place, call in enumerate(calls):
            Thread(target=run, args=(place, call), daemon=True).start()
        results = {}
        for _ in calls:
            place, results[place], error = ended.get(timeout=60)
            if error is not None:
                raise error
        return [results[place] for place in range(len(calls))]

    def connect(self) -> None:
        engines = self.trainer + self.rollout
        members = [engine.prepare() for engine in engines]
        trainer, rollout = JetCheckpointEngine.build_topology(TRAINER, len(self.rollout), members)
        calls = []
        for engine, *arguments in zip(
            engines, *([*trainer[name], *rollout[name]] for name in ("group", "store")), strict=True
        ):
            calls.append(lambda engine=engine, arguments=arguments: engine.init_process_group(*arguments))
        self.each(*calls)

    def sync(self, *streams: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
        """What the rollout's ranks get; ``streams``: of the trainer's ranks."""
        self.connect()

        async def receive(engine):
            # Copied, since a reader has a tensor until it asks for the next one.
            return [(name, tensor.clone()) async for name, tensor in engine.receive_weights()]

        calls = [
            lambda engine=engine, stream=stream: asyncio.run(engine.send_weights(iter(stream)))
            for engine, stream in zip(self.trainer, streams, strict=True)
        ]
        calls += [lambda engine=engine: asyncio.run(receive(engine)) for engine in self.rollout]
        arrived = self.each(*calls)[TRAINER:]
        for engine in self.trainer + self.rollout:
            engine.finalize()
        return arrived


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(checkpoint_engine, "_TIMEOUT", timedelta(seconds=5))
    monkeypatch.setattr(checkpoint_engine, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(checkpoint_engine, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(checkpoint_engine, "get_torch_device", lambda: torch.cpu)


def check(arrived, sent) -> None:
    for tensors_of_rank in arrived:
        assert [name for name, _ in tensors_of_rank] == [name for name, _ in sent]
        for (name, tensor), (_, other) in zip(tensors_of_rank, sent, strict=True):
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
            assert torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
            )


@pytest.mark.parametrize("rollout", [1, 3])
def test_every_tensor_of_three_syncs_arrives_at_every_rank(rollout):
    job = Job(rollout)
    for seed in range(3):
        check(job.sync(tensors(seed), tensors(seed)), tensors(seed))
    assert len({engine._group.name for engine in job.trainer + job.rollout}) == 1, "one group for all syncs"


def test_a_replica_may_leave_and_another_join():
    job = Job(2)
    check(job.sync(tensors(0), tensors(0)), tensors(0))
    job.rollout = job.rollout[1:]
    check(job.sync(tensors(1), tensors(1)), tensors(1))
    job.rollout.append(JetCheckpointEngine(BUCKET))
    check(job.sync(tensors(2), tensors(2)), tensors(2))


def test_a_trainers_rank_on_another_host_only_gathers():
    job = Job(1)
    job.trainer[1]._node = "10.0.0.2"
    read = []
    (arrived,) = job.sync(tensors(0), (read.append(item) or item for item in tensors(0)))
    check([arrived], tensors(0))
    assert len(read) == len(tensors(0)) and job.trainer[1]._group is None


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (tensors(1), r"rank 1 of the trainer has jetrl:\[1\] \(uint8 \[14\]\) where rank 0 has .*\(uint8 \[13\]\)"),
        (tensors(0)[:-1], "rank 1 of the trainer has the end where rank 0 has parameter"),
        ([*tensors(0), ("more", torch.zeros(1))], "rank 1 of the trainer has more .* where rank 0 has the end"),
    ],
    ids=["another length", "fewer tensors", "more tensors"],
)
def test_a_rank_with_another_stream_says_so(stream, words):
    with pytest.raises(WeightSyncError, match=words):
        Job(1).sync(tensors(0), stream)


def test_a_rollout_whose_trainer_sends_nothing_says_so(monkeypatch):
    monkeypatch.setattr(checkpoint_engine, "_TIMEOUT", timedelta(seconds=1))
    job = Job(1)
    job.connect()

    async def first():
        return await anext(job.rollout[0].receive_weights())

    with pytest.raises(WeightSyncError, match="the trainer's first rank is gone or has sent nothing for 1 s"):
        asyncio.run(first())
