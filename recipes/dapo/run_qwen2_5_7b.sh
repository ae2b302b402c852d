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
# DAPO with Qwen2.5-7B: the 32B recipe with a model that fits one machine of eight GPUs. See README.md.
# verl-recipe has no run of this model; its dapo/test_dapo_7b_math.sh trains Qwen2.5-Math-7B with the same numbers but
# MAX_RESPONSE_LENGTH=8192 and no dynamic sampling, from which the sequence parallel size is taken.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=qwen2_5_7b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B}
TP=${TP:-1}
SP=${SP:-$(sequence_parallel 4)}
OFFLOAD=${OFFLOAD:-True}

source "$RECIPES/dapo/dapo.sh"
