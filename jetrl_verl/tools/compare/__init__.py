# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl compare``: one job under several precisions, all runs scored by one BF16 engine."""
