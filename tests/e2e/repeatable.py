# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes two jobs of verl sample the same tokens and train on them in the same order.

verl seeds an engine, not a request, so a token depends on the requests in its step; a batch is in order of completion.
verl imports this module wherever it reads the model's config (``external_lib``); the trainer loads the buffer.
"""

import functools
import zlib
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from jetrl_verl.patches.after_import import when_imported

AGENT_LOOP = "verl.experimental.agent_loop.single_turn_agent_loop"


def seed_requests() -> None:
    """Seed each request of verl's agent loop by step, prompt and position in the group."""
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    stock = SingleTurnAgentLoop.run

    @functools.wraps(stock)
    async def run(self: Any, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        words = (int(kwargs["global_steps"]), int(kwargs["session_id"]), kwargs["raw_prompt"][-1]["content"])
        return await stock(self, {**sampling_params, "seed": zlib.crc32(repr(words).encode())}, **kwargs)

    SingleTurnAgentLoop.run = run


when_imported(AGENT_LOOP, "tests: seeded requests", seed_requests)


class SortedBatches(ReplayBuffer):
    """verl's buffer with batches sorted by tokens."""

    def _materialize_batch(self, partition_id: str, *args: Any) -> Any:
        import transfer_queue

        batch = super()._materialize_batch(partition_id, *args)
        data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["input_ids"])
        tokens = [row.tolist() for row in data["input_ids"].unbind()]
        batch.reorder(sorted(range(len(tokens)), key=tokens.__getitem__))
        return batch
