# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The end-to-end tests' policy: the demo's, warmed up once and cached with its outputs."""

from pathlib import Path

import pytest

from jetrl_verl.tools.demo import cache

CACHE = Path(__file__).parents[2] / "outputs" / "cache"


@pytest.fixture(scope="session")
def policy() -> cache.Prepared:
    """Data and policy; ``policy.folder.parent`` is the demo's cache."""
    return cache.make(cache.Recipe(), CACHE, "cpu")
