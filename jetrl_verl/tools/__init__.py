# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of ``jetrl``: doctor, report, diff, memory, compare and demo."""
