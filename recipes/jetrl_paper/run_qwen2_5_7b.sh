#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Jet-RL's experiments with Qwen2.5-7B. See README.md and grpo.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=qwen2_5_7b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B}

source "$RECIPES/jetrl_paper/grpo.sh"
