# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The end-to-end tests' policy: the demo's, warmed up once and cached with its outputs."""

import os
from pathlib import Path

import pytest
import torch

from jetrl_verl.tools.demo import cache

CACHE = Path(__file__).parents[2] / "outputs" / "cache"


@pytest.fixture(scope="session")
def policy() -> cache.Prepared:
    """Data and policy; ``policy.folder.parent`` is the demo's cache."""
    recipe = cache.Recipe()
    if (prepared := cache.find(recipe, CACHE)) is not None:
        return prepared
    # Tests have one thread per process; the warm-up uses all cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        return cache.make(recipe, CACHE, "cpu")
    finally:
        torch.set_num_threads(threads)
