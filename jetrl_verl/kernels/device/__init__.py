# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Device code that several Triton kernels share, and the decorator of all kernels (launch.py)."""
