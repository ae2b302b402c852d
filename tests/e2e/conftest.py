# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests share: the demo's policy, warmed up once and cached beside the demo's outputs."""

from pathlib import Path

import pytest

from jetrl_verl.tools.demo import cache

CACHE = Path(__file__).parents[2] / "outputs" / "cache"


@pytest.fixture(scope="session")
def policy() -> cache.Prepared:
    """Data and policy; ``policy.folder.parent`` is the cache that a demo finds them in."""
    recipe = cache.Recipe()
    return cache.find(recipe, CACHE) or cache.make(recipe, CACHE, "cpu", print)
