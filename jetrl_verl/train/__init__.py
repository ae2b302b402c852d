# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The training side: verl's FSDP engine with quantized linears and, where asked for, the shared operations."""
