# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a run measures of quantization and of the mismatch between rollout and trainer."""
