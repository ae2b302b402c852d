#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# The experiments of Jet-RL (arXiv 2601.14243, section 5): GRPO on math with long responses; sourced by the scripts of
# the three models, which choose EXPERIMENT and MODEL_PATH.
#
#   DATASET=gsm8k_math | deepmath     RESPONSE=8k | 16k     (the paper's DeepMATH runs use 16k)
#
# The paper names models, data, response lengths, verl, vLLM and H100s. Batch size, learning rate and the rest are those
# of verl for GRPO on GSM8K + MATH with an 8B model (examples/grpo_trainer/run_qwen3_8b_fsdp.sh of verl 0.9). Validation
# on GSM8K and MATH-500 is our choice. Models of this size fit one GPU (TP=1).

DATASET=${DATASET:-gsm8k_math}
RESPONSE=${RESPONSE:-8k}
DATA=${DATA:-$HOME/data/jetrl_paper}
TP=${TP:-1}

case $DATASET in
    gsm8k_math) TRAIN_FILES="['$DATA/gsm8k_train.parquet','$DATA/math_train.parquet']" ;;
    deepmath) TRAIN_FILES="['$DATA/deepmath.parquet']" ;;
    *)
        echo "error: DATASET=$DATASET is unknown; use gsm8k_math or deepmath" >&2
        exit 1
        ;;
esac

case $RESPONSE in
    8k) MAX_RESPONSE_LENGTH=8192 ;;
    16k) MAX_RESPONSE_LENGTH=16384 ;;
    *)
        echo "error: RESPONSE=$RESPONSE is unknown; use 8k or 16k" >&2
        exit 1
        ;;
esac

MAX_PROMPT_LENGTH=1024
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))}

DATA_ARGS=(
    data.train_files="$TRAIN_FILES"
    data.val_files="['$DATA/gsm8k_test.parquet','$DATA/math_500.parquet']"
    data.train_batch_size=1024
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=True
    data.truncation=error
)

ALGORITHM=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
)

# verl grades GSM8K, MATH and MATH-500 itself; DeepMATH is graded here.
REWARD=(
    reward.custom_reward_function.path="'$RECIPES/common/reward.py'"
    reward.custom_reward_function.name=compute_score
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

launch jetrl_paper "${EXPERIMENT}_${DATASET}_$RESPONSE" \
    "${DATA_ARGS[@]}" \
    "${ALGORITHM[@]}" \
    "${REWARD[@]}" \
    "${MODEL[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${REF[@]}" \
    "${TRAINER[@]}" \
    "$@"
