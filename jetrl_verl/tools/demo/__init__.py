# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``make demo``: real verl and vLLM learn arithmetic under one precision, on a CPU or a GPU; a report at the end."""
