#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# GRPO on GSM8K with Qwen3-8B: verl's smallest real recipe, a first run on eight GPUs. See README.md.
# The numbers are those of verl's own example for this model and data (examples/grpo_trainer/run_qwen3-8b.sh of verl
# 0.7; from 0.9 on it adds MATH, batches by tokens as here, and asks for responses of 2048 tokens). Chosen here:
#   TP=1   verl has 2; an 8B model fits one GPU
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DATA=${DATA:-$HOME/data/gsm8k}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-24576}
TP=${TP:-1}

DATA_ARGS=(
    data.train_files="['$DATA/train.parquet']"
    data.val_files="['$DATA/test.parquet']"
    data.train_batch_size=1024
    data.max_prompt_length=512
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
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
)

REF=(
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)

TRAINER=(
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)

launch jetrl_gsm8k "${EXPERIMENT:-qwen3_8b}" \
    "${DATA_ARGS[@]}" \
    "${ALGORITHM[@]}" \
    "${MODEL[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${REF[@]}" \
    "${TRAINER[@]}" \
    "$@"
