#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
#
# DAPO with Qwen2.5-32B, the paper's own model. Published on 16 machines of eight GPUs (NNODES=16). See README.md.
# TP=4 and SP=8 are the published sizes; one GPU does not hold the BF16 baseline's rollout beside its training shards.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=qwen2_5_32b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-32B}
TP=${TP:-4}
SP=${SP:-$(sequence_parallel 8)}
OFFLOAD=${OFFLOAD:-True}

source "$RECIPES/dapo/dapo.sh"
