# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Mistral. Version 0.1 has sliding window attention, which shared operations do not cover; later versions have none."""

from jetrl_verl.models.families.base import Family

FAMILY = Family("mistral")
