# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Images on a GPU by model family, with torch.compile and CUDA graphs: the checks of test_images_on_cpu.py, each in a
process of its own, since an engine leaves memory and graphs."""

import multiprocessing
from pathlib import Path

import pytest

pytest.importorskip("torchvision", reason="transformers' processors of images and videos need it")


def check_family(family: str, folder: str) -> None:
    """In a process of its own."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import test_images_on_cpu as checks

    memory = dict(gpu_memory_utilization=0.05, kv_cache_memory_bytes=2**28)  # fixed: other jobs may use the GPU
    checks.check(family, Path(folder), "cuda", enforce_eager=False, **memory)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"])
def test_text_is_exact_next_to_images_which_are_close(family, tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=check_family, args=(family, str(tmp_path)))
    process.start()
    process.join()
    assert process.exitcode == 0
