# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The rollout side: vLLM's FP8 linear method, the worker extension that receives qdata, their registration."""
