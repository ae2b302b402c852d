#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# GRPO on GSM8K with Qwen3.5-4B on one machine of eight GPUs. See README.md and grpo.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=qwen3_5_4b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3.5-4B}
TP=${TP:-1}
OFFLOAD=${OFFLOAD:-False}

source "$RECIPES/qwen3_5/grpo.sh"
