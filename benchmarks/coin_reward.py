# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A reward with variance for policies that answer nothing: the recipe's own is computed, then a coin decides.

A random policy's answers are all wrong, so GRPO's advantages are all zero and DAPO's dynamic sampling replaces every
group for ever. The coin is a checksum of the response, so equal runs have equal rewards. verl loads this file by path.
"""

import importlib.util
import zlib
from pathlib import Path


def _recipes_reward():
    spec = importlib.util.spec_from_file_location(
        "jetrl_recipe_reward", Path(__file__).parents[1] / "recipes/common/reward.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


_compute_score = _recipes_reward()


def compute_score(data_source: str, solution_str: str, ground_truth, extra_info: dict | None = None, **kwargs) -> dict:
    """verl's reward function: ``score`` and ``acc``, 0 or 1."""
    _compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
    heads = float(zlib.crc32(solution_str.encode()) & 1)
    return {"score": heads, "acc": heads}
