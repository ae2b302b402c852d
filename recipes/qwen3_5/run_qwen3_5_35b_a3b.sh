#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# GRPO on GSM8K with Qwen3.5-35B-A3B, a mixture of experts, on one machine of eight H200s. See README.md and grpo.sh.
# Experts fit 128 at TP 1, 2 and 4. No load-balancing loss: verl's FSDP engine has none.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=qwen3_5_35b_a3b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3.5-35B-A3B}
TP=${TP:-2}
OFFLOAD=${OFFLOAD:-True}

source "$RECIPES/qwen3_5/grpo.sh"
