#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# DAPO (arXiv 2503.14476) on DAPO-Math-17k, validated on AIME 2024; sourced by run_qwen2_5_{7b,32b}.sh, which choose
# EXPERIMENT, MODEL_PATH and how the model is spread over GPUs: TP of the rollout, SP (Ulysses) and OFFLOAD of training.
# The numbers are those of verl-recipe's dapo/run_dapo_qwen2.5_32b.sh, with the v1 trainer's names. Chosen here:
#   total_epochs=35     the published file repeats each problem about 100 times and is read once: at most 1166 steps.
#                       prepare_data.py keeps each problem once: 33 steps an epoch
#   val_kwargs.n=32     the published AIME file repeats each problem 32 times
# The published gen_batch_size=1536 has no counterpart: the v1 trainer replaces filtered groups one by one.

DATA=${DATA:-$HOME/data/dapo}
MAX_PROMPT_LENGTH=2048
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-20480}
OVERLONG_BUFFER=4096
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))}

DATA_ARGS=(
    data.train_files="['$DATA/dapo_math_17k.parquet']"
    data.val_files="['$DATA/aime_2024.parquet']"
    data.train_batch_size=512
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.truncation=left
)

# Dynamic sampling: a group whose answers are all right or all wrong has no advantage and is replaced.
ALGORITHM=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=acc
)

# Overlong penalty: the reward falls by up to 1 over the last 4096 tokens.
REWARD=(
    reward.reward_manager.name=dapo
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len="$OVERLONG_BUFFER"
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    +reward.reward_kwargs.overlong_buffer_cfg.log=False
    +reward.reward_kwargs.max_resp_len="$MAX_RESPONSE_LENGTH"
)

MODEL=(
    actor_rollout_ref.model.path="'$MODEL_PATH'"
    actor_rollout_ref.model.enable_gradient_checkpointing=True
)

# Clip-higher and the loss as a mean over tokens; clip_ratio_c bounds the loss of tokens with a negative advantage.
ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.grad_clip=1.0
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS_PER_GPU"
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SP"
    actor_rollout_ref.actor.fsdp_config.param_offload="$OFFLOAD"
    actor_rollout_ref.actor.fsdp_config.optimizer_offload="$OFFLOAD"
)

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.tensor_model_parallel_size="$TP"
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8
    actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.max_num_batched_tokens=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.n=32
)

TRAINER=(
    trainer.val_before_train=True
    trainer.test_freq=5
    trainer.save_freq=5
    trainer.total_epochs=35
)

launch jetrl_dapo "$EXPERIMENT" \
    "${DATA_ARGS[@]}" \
    "${ALGORITHM[@]}" \
    "${REWARD[@]}" \
    "${MODEL[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${TRAINER[@]}" \
    "$@"
