# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL: Qwen2.5 under a vision tower; its positions are dealt to a head's frequencies by sections.

verl's forward of a micro-batch without an image takes the mean of an output that transformers 5 wraps in an object.
"""

from jetrl_verl.models.families.qwen2 import Qwen2
from jetrl_verl.models.families.vision import VisionFamily


class Qwen25VL(VisionFamily, Qwen2):
    """Both checks."""


FAMILY = Qwen25VL("qwen2_5_vl", interleaved=False, stock_text=False)
