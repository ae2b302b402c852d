# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of the FP8 engine on two GPUs, resharded, resumes under NCCL on one and on four.

The weight sync after loading sends the same bytes as the one at saving. All ranks see the same sequences, so the next
gradient norm is equal up to rounding.
"""

import pytest
import torch
from engines import build, sent, train
from tiny_models import tiny_model
from two_processes import joined, run_in_processes

from jetrl_verl.checkpoint.reshard import reshard

BACKEND = "cpu:gloo,cuda:nccl"


def saves(rank: int, run: str, folder: str) -> None:
    torch.cuda.set_device(rank)
    with joined(rank, 2, f"{run}/store2", BACKEND):
        engine = build(folder)
        train(engine, seed=1)
        train(engine, seed=2)
        engine.save_checkpoint(f"{run}/global_step_2/actor", global_step=2)
        stream = {name: tensor.cpu() for name, tensor in sent(engine).items()}
        norm = train(engine, seed=3)
        if rank == 0:
            torch.save({"sent": stream, "norm": norm}, f"{run}/seen.pt")


def resumes(rank: int, run: str, other: str, world: int) -> None:
    torch.cuda.set_device(rank)
    with joined(rank, world, f"{run}/store{world}", BACKEND):
        engine = build(other)
        engine.load_checkpoint(f"{run}/global_step_2/actor", del_local_after_load=False)
        seen, now = torch.load(f"{run}/seen.pt"), sent(engine)
        assert now.keys() == seen["sent"].keys()
        for name, tensor in seen["sent"].items():
            assert torch.equal(now[name].cpu().view(torch.uint8), tensor.view(torch.uint8)), name
        assert train(engine, seed=3) == pytest.approx(seen["norm"], rel=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs make the checkpoint")
def test_a_checkpoint_of_two_gpus_resumes_on_one_and_four(tmp_path):
    policy, other = (str(tmp_path / name) for name in ("policy", "other"))
    for seed, path in enumerate((policy, other)):
        tiny_model("qwen3", seed).save_pretrained(path)
    run_in_processes(2, saves, str(tmp_path), policy)
    for world in (1, 4):
        if world <= torch.cuda.device_count():
            reshard(tmp_path / "global_step_2", world)
            run_in_processes(world, resumes, str(tmp_path), other, world)
