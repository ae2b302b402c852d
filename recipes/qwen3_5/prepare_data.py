# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data of this recipe: GSM8K, train and test.

Run from the root of the checkout: ``python3 -m recipes.qwen3_5.prepare_data --help``.
"""

from recipes.common.prepare import main
from recipes.gsm8k.prepare_data import SPLITS

if __name__ == "__main__":
    main("qwen3_5", SPLITS)
