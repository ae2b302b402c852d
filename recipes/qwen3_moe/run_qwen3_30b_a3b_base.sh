#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# GRPO on GSM8K + MATH with Qwen3-30B-A3B-Base, a mixture of experts, on eight GPUs under FSDP2. See README.md.
# Data, batch, learning rate and loss are those of the 8B models in ../jetrl_paper. Chosen here:
#   TP=1                  experts fit 128 at 1 and 2; TP=2 where a GPU has 80 GB
#   MAX_TOKENS_PER_GPU    FSDP2 gathers a layer for every micro-batch: as many tokens as memory allows
#   OFFLOAD=True          parameters and optimizer stay in host memory during the rollout
# No load-balancing loss: verl's FSDP engine has none.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-30B-A3B-Base}
DATA=${DATA:-$HOME/data/qwen3_moe}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-32768}
TP=${TP:-1}
OFFLOAD=${OFFLOAD:-True}

DATA_ARGS=(
    data.train_files="['$DATA/gsm8k_train.parquet','$DATA/math_train.parquet']"
    data.val_files="['$DATA/gsm8k_test.parquet','$DATA/math_500.parquet']"
    data.train_batch_size=1024
    data.max_prompt_length=1024
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=True
    data.truncation=error
)

ALGORITHM=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
)

MODEL=(
    actor_rollout_ref.model.path="'$MODEL_PATH'"
    actor_rollout_ref.model.enable_gradient_checkpointing=True
)

ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.fsdp_config.param_offload="$OFFLOAD"
    actor_rollout_ref.actor.fsdp_config.optimizer_offload="$OFFLOAD"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS_PER_GPU"
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
)

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.tensor_model_parallel_size="$TP"
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
)

REF=(
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)

TRAINER=(
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)

launch jetrl_qwen3_moe qwen3_30b_a3b_base \
    "${DATA_ARGS[@]}" \
    "${ALGORITHM[@]}" \
    "${MODEL[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${REF[@]}" \
    "${TRAINER[@]}" \
    "$@"
