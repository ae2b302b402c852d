# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3 and models of their type (DeepSeek-R1-Distill-Llama): the defaults of base.py."""

from jetrl_verl.models.families.base import Family

FAMILY = Family("llama")
