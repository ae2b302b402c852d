# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Mistral: a Llama without biases. Version 0.1 slides a window over every layer, which shared operations do not cover
(``sliding_window`` without ``layer_types``); later versions have ``sliding_window: null``."""

from jetrl_verl.models.families.base import Family

FAMILY = Family("mistral")
