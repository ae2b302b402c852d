# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What ``_target_`` in ``config/precision/*.yaml`` names: where verl and Hydra enter this package.

``configs`` has verl's engine and rollout configs as a worker builds them, ``job`` the callback of the driver. They are
the top of the package: they may import the engine, vLLM's arguments and the patches, and nothing imports them but
Hydra.
"""
