#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# DAPO with Qwen2.5-7B: the 32B recipe with a model that fits one machine of eight GPUs. See README.md.
# verl-recipe has no run of this model. The sequence parallel size is from its dapo/test_dapo_7b_math.sh, which trains
# Qwen2.5-Math-7B with MAX_RESPONSE_LENGTH=8192 and no dynamic sampling.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=qwen2_5_7b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B}
TP=${TP:-1}
SP=${SP:-$(sequence_parallel 4)}
OFFLOAD=${OFFLOAD:-True}

source "$RECIPES/dapo/dapo.sh"
