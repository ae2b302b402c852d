#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# GRPO on GSM8K with Qwen3.5-27B on two machines of eight GPUs (NNODES=2). See README.md and grpo.sh.
# TP=4 is that of verl's own script for this model.
set -euo pipefail
NNODES=${NNODES:-2}
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=qwen3_5_27b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3.5-27B}
TP=${TP:-4}
OFFLOAD=${OFFLOAD:-True}

source "$RECIPES/qwen3_5/grpo.sh"
