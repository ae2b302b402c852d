#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Jet-RL's experiments with Qwen3-8B-Base. See README.md and grpo.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=qwen3_8b_base
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B-Base}

source "$RECIPES/jetrl_paper/grpo.sh"
