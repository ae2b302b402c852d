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
"""What the end-to-end tests share: the demo's policy, warmed up once and cached beside the demo's outputs."""

from pathlib import Path

import pytest

from jetrl_verl.demo import cache

CACHE = Path(__file__).parents[2] / "outputs" / "cache"


@pytest.fixture(scope="session")
def policy() -> cache.Prepared:
    """Data and policy; ``policy.folder.parent`` is the cache that a demo finds them in."""
    recipe = cache.Recipe()
    return cache.find(recipe, CACHE) or cache.make(recipe, CACHE, "cpu", print)
