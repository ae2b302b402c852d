# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Data of this recipe: GSM8K, train and test.

Run from the root of the checkout: ``python3 -m recipes.gsm8k.prepare_data --help``.
"""

from recipes.common.prepare import main
from recipes.common.sources import GSM8K_TEST, GSM8K_TRAIN

SPLITS = {"train": GSM8K_TRAIN, "test": GSM8K_TEST}
"""Name of a split, of its raw file and of the parquet file -> where it comes from."""

if __name__ == "__main__":
    main("gsm8k", SPLITS)
