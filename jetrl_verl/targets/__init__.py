# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Classes that ``_target_`` in ``config/**/*.yaml`` names: ``configs`` for workers, ``job`` for the driver.

The top of the package: only Hydra imports them.
"""
