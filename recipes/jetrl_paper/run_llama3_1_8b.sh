#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Jet-RL's experiments with Llama3.1-8B. See README.md and grpo.sh.
# The base model's tokenizer has no chat template, which verl needs; this one is the plain text.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

EXPERIMENT=llama3_1_8b
MODEL_PATH=${MODEL_PATH:-meta-llama/Llama-3.1-8B}
CHAT_TEMPLATE=${CHAT_TEMPLATE:-'{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}'}

set -- actor_rollout_ref.model.custom_chat_template="'$CHAT_TEMPLATE'" "$@"
source "$RECIPES/jetrl_paper/grpo.sh"
