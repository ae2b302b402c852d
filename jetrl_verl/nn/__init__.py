# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The modules that replace a Hugging Face model's own in the trainer."""
