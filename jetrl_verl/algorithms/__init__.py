# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of the learning algorithm that the precisions need and verl lacks; docs/methods.md has the papers."""
