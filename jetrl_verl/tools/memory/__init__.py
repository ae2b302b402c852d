# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl memory``: what a GPU holds in each phase of a step under each precision. Arithmetic; no GPU, no network."""
