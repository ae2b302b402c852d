# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a weight sync sends, and the contract check of what arrived."""
