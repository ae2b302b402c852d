# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Device code that the Triton kernels of several operations share, and the decorator of all of them (launch.py)."""
