# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The rings of csrc/pipeline.cuh and csrc/tile_ring.cuh as a small state machine, over every interleaving.

A ring is the order in which its stages are used: 0, 1, 2, 0, 1, 2, ..., or 0 again with every tile. Two blocks of a
cluster, each with a producer and a consumer warp, share a tile by multicast. A state holds how far each of the four is,
which copies are in flight, and the barriers; the search takes every step from every state once.
The emulator runs the real code under some interleavings; this runs the protocol under all of them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

BLOCKS = 2


class Barrier(NamedTuple):
    phase: int
    pending: int
    bytes: int  # in tiles' halves

    def changed(self, arrivals: int, bytes: int, count: int) -> "Barrier":
        pending, left = self.pending - arrivals, self.bytes + bytes
        assert pending >= 0, "an arrival too many"
        return Barrier(self.phase + 1, count, 0) if pending == left == 0 else Barrier(self.phase, pending, left)

    def over(self, parity: int) -> bool:
        return self.phase % 2 != parity


class State(NamedTuple):
    producer: tuple[int, ...]  # steps: 0 wait for `empty`, 1 announce, 2 send to both blocks; 3 per use
    consumer: tuple[int, ...]  # steps: 0 wait for `full`, 1 read, 2 release here, 3 release there; 4 per use
    flying: frozenset  # (from, to, use)
    full: tuple[tuple[Barrier, ...], ...]
    empty: tuple[tuple[Barrier, ...], ...]


def start(stages: int, full_arrivals: int = 1, empty_arrivals: int = BLOCKS) -> State:
    full = tuple(tuple(Barrier(0, full_arrivals, 0) for _ in range(stages)) for _ in range(BLOCKS))
    empty = tuple(tuple(Barrier(0, empty_arrivals, 0) for _ in range(stages)) for _ in range(BLOCKS))
    return State((0,) * BLOCKS, (0,) * BLOCKS, frozenset(), full, empty)


def put(row: tuple, index: int, value) -> tuple:
    return (*row[:index], value, *row[index + 1 :])


def change(grid: tuple, block: int, stage: int, count: int, arrivals: int = 0, bytes: int = 0) -> tuple:
    return put(grid, block, put(grid[block], stage, grid[block][stage].changed(arrivals, bytes, count)))


def parity_of(order: tuple[int, ...], use: int) -> int:
    """How often the stage of this use was used before, modulo 2."""
    return order[:use].count(order[use]) % 2


def steps(state: State, order: tuple[int, ...], first_parity: int, empty_count: int) -> Iterator[State]:
    """Every state that one step leads to; an assertion fails where a step would break the protocol."""
    uses = len(order)
    for block in range(BLOCKS):
        use, step = divmod(state.producer[block], 3)
        stage, parity = (order[use], parity_of(order, use)) if use < uses else (0, 0)
        advanced = state._replace(producer=put(state.producer, block, 3 * use + step + 1))
        if use < uses and step == 0 and state.empty[block][stage].over(parity ^ first_parity):
            yield advanced
        elif use < uses and step == 1:
            yield advanced._replace(full=change(state.full, block, stage, 1, arrivals=1, bytes=BLOCKS))
        elif use < uses and step == 2:
            yield advanced._replace(flying=state.flying | {(block, to, use) for to in range(BLOCKS)})

        use, step = divmod(state.consumer[block], 4)
        stage, parity = (order[use], parity_of(order, use)) if use < uses else (0, 0)
        advanced = state._replace(consumer=put(state.consumer, block, 4 * use + step + 1))
        if use < uses and step == 0 and state.full[block][stage].over(parity):
            yield advanced
        elif use < uses and step == 1:
            sent = all(state.producer[sender] >= 3 * use + 3 for sender in range(BLOCKS))
            landed = all((sender, block, use) not in state.flying for sender in range(BLOCKS))
            assert sent and landed, "a stage is read before its tile is whole"
            yield advanced
        elif use < uses and step > 1:
            to = block if step == 2 else 1 - block
            yield advanced._replace(empty=change(state.empty, to, stage, empty_count, arrivals=1))

    for copy in state.flying:
        _, to, use = copy
        before = [earlier for earlier in range(use) if order[earlier] == order[use]]
        assert not before or state.consumer[to] > 4 * before[-1] + 1, "a stage is overwritten before it is read"
        full = change(state.full, to, order[use], 1, bytes=-1)
        yield state._replace(flying=state.flying - {copy}, full=full)


def explore(order: tuple[int, ...], first_parity: int = 1, empty_count: int = BLOCKS) -> int:
    """Number of states; an assertion fails at a broken rule or where nobody can go on before all is done."""
    uses = len(order)
    begin = start(max(order) + 1, empty_arrivals=empty_count)
    seen, frontier = {begin}, [begin]
    while frontier:
        state = frontier.pop()
        following = list(steps(state, order, first_parity, empty_count))
        done = not state.flying and set(state.producer) == {3 * uses} and set(state.consumer) == {4 * uses}
        assert following or done, "deadlock"
        for one in following:
            if one not in seen:
                seen.add(one)
                frontier.append(one)
    return len(seen)


@pytest.mark.parametrize("order", [(0, 0, 0), (0, 1, 0, 1, 0), (0, 1, 2, 0)], ids=str)
def test_no_interleaving_reads_early_overwrites_early_or_stops(order):
    assert explore(order) > 100


@pytest.mark.parametrize("order", [(0, 1, 0, 0, 1), (0, 0, 0, 0)], ids=str)
def test_nor_does_one_where_every_tile_starts_with_stage_0(order):
    """Tiles of three K blocks and two stages; of one, which leave the second stage unused."""
    assert explore(order) > 100


def test_a_producer_that_waits_for_the_other_parity_stops():
    with pytest.raises(AssertionError, match="deadlock"):
        explore((0, 1, 0), first_parity=0)


def test_an_empty_barrier_that_counts_one_block_only_is_overwritten_or_overrun():
    with pytest.raises(AssertionError, match="before it is read|too many|before its tile is whole"):
        explore((0, 1, 0, 1, 0), empty_count=1)
