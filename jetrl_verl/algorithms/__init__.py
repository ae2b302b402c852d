# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the precisions need of the learning algorithm and verl lacks.

``losses`` holds policy losses for a quantized rollout, ``calibrated_clipping`` the clip bounds of the unified FP8 flow,
``shadow`` the BF16 forwards that they are calibrated against, ``invariant_scaling`` QuRL's reparametrisation and
``adaptive_correction`` importance weights whose strength follows the batch. Only ``losses`` and ``shadow`` import verl.
"""
