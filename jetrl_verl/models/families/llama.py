# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3, and what is published under their type (DeepSeek-R1-Distill-Llama): the dense decoder of base.py."""

from jetrl_verl.models.families.base import Family

FAMILY = Family("llama")
