# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Model families: which layers each has, which run in FP8, what the shared operations cover."""

from jetrl_verl.models.families import family, model_types
from jetrl_verl.models.families.base import Family, Unsupported, UnsupportedLayer, UnsupportedOperation
