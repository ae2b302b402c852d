# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data of this recipe: GSM8K + MATH to train on, GSM8K and MATH-500 to validate.

Run from the root of the checkout: ``python3 -m recipes.qwen3_moe.prepare_data --help``.
"""

from recipes.common.prepare import main
from recipes.common.sources import GSM8K_TEST, GSM8K_TRAIN, MATH_500, MATH_TRAIN

SPLITS = {"gsm8k_train": GSM8K_TRAIN, "math_train": MATH_TRAIN, "gsm8k_test": GSM8K_TEST, "math_500": MATH_500}
"""Name of a split, of its raw file and of the parquet file -> where it comes from."""

if __name__ == "__main__":
    main("qwen3_moe", SPLITS)
