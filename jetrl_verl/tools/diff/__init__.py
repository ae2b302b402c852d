# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff``: the operations in which rollout and trainer differ, and what each kind adds to the mismatch."""
