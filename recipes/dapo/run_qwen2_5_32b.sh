#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# DAPO with Qwen2.5-32B, the paper's own model. Published on 16 machines of eight GPUs (NNODES=16). See README.md.
# TP=4 and SP=8 are the published sizes; one GPU does not hold the BF16 rollout next to its training shards.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=qwen2_5_32b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-32B}
TP=${TP:-4}
SP=${SP:-$(sequence_parallel 8)}
OFFLOAD=${OFFLOAD:-True}

source "$RECIPES/dapo/dapo.sh"
