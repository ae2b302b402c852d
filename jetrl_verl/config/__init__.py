# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The flag ``precision=`` and its options: the Hydra group, the job that the driver resolves, and the checks."""
