#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# GRPO on GSM8K with Qwen3.5, a hybrid of gated delta net and gated attention; sourced by the scripts of this folder, which
# choose EXPERIMENT, MODEL_PATH and how the model is spread over GPUs: TP of the rollout, SP (Ulysses) and OFFLOAD of
# training. Data, batch, learning rate and loss are those of ../gsm8k. Chosen here:
#   MAX_RESPONSE_LENGTH=2048   the released models write longer answers than Qwen3
#   enable_thinking=False      grade-school problems need no thoughts

DATA=${DATA:-$HOME/data/qwen3_5}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-2048}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-16384}
SP=${SP:-1}

DATA_ARGS=(
    data.train_files="['$DATA/train.parquet']"
    data.val_files="['$DATA/test.parquet']"
    data.train_batch_size=1024
    data.max_prompt_length=512
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=True
    data.truncation=error
    +data.apply_chat_template_kwargs.enable_thinking=False
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
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SP"
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

launch jetrl_qwen3_5 "$EXPERIMENT" \
    "${DATA_ARGS[@]}" \
    "${ALGORITHM[@]}" \
    "${MODEL[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${REF[@]}" \
    "${TRAINER[@]}" \
    "$@"
