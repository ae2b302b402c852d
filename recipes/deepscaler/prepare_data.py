# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data of this recipe: DeepScaleR-Preview to train on, AIME 2024 to validate.

Run from the root of the checkout: ``python3 -m recipes.deepscaler.prepare_data --help``.
"""

from recipes.common.prepare import main
from recipes.common.sources import AIME_2024, DEEPSCALER

SPLITS = {"deepscaler": DEEPSCALER, "aime_2024": AIME_2024}
"""Name of a split, of its raw file and of the parquet file -> where it comes from."""

if __name__ == "__main__":
    main("deepscaler", SPLITS)
