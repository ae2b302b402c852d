# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data of this recipe: GSM8K, train and test.

Run from the root of the checkout: ``python3 -m recipes.gsm8k.prepare_data --help``.
"""

from recipes.common.prepare import main
from recipes.common.sources import GSM8K_TEST, GSM8K_TRAIN

SPLITS = {"train": GSM8K_TRAIN, "test": GSM8K_TEST}
"""Name of a split, of its raw file and of the parquet file -> where it comes from."""

if __name__ == "__main__":
    main("gsm8k", SPLITS)
