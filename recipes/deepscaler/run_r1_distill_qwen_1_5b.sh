#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# DeepScaleR: GRPO on DeepSeek-R1-Distill-Qwen-1.5B in three stages of growing response length. See README.md.
#
#   STAGE=8k | 16k | 24k   each starts from the last weights of the stage before it
#
# The numbers are those of rllm's scripts/deepscaler/train/deepscaler_1.5b_{8k,16k,24k}.sh; its README gives the steps at
# which the length grew, 1040 and 1520. As there, a stage takes over only the policy: the optimizer starts fresh, and
# the KL term's reference is the policy that the stage starts from. So stages may run on
# different numbers of GPUs. Chosen here:
#   230 steps of 24k          the published scripts have no end, and no source gives their length
#   clip_ratio_c              verl's default, 3; the verl of the published scripts had no such bound on the loss of
#                             a negative advantage. Its entropy_coeff, 0.001, is set here: verl's default has changed
#   val_kwargs.top_p=0.95     as the authors evaluate; the published scripts leave it to an older verl
#   filter_overlong_prompts   a prompt of more than 1024 tokens is left out instead of stopping the run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

PROJECT=jetrl_deepscaler
MODEL=r1_distill_qwen_1_5b
STAGE=${STAGE:-8k}

# The Hugging Face folder in which stage $1 leaves its policy after its last step, $2 (save_contents below).
policy_of() {
    local folder=$OUT/$PROJECT/${MODEL}_$1-$PRECISION/global_step_$2/actor/huggingface
    if [[ ! -d $folder ]]; then
        echo "error: stage $1 left no policy in $folder; run STAGE=$1 to its end or name a model with MODEL_PATH" >&2
        exit 1
    fi
    echo "$folder"
}

case $STAGE in
    8k)
        STEPS=1040 N=8 SAVE_FREQ=20 MAX_RESPONSE_LENGTH=8192
        MODEL_PATH=${MODEL_PATH:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}
        ;;
    16k)
        STEPS=480 N=16 SAVE_FREQ=10 MAX_RESPONSE_LENGTH=16384
        MODEL_PATH=${MODEL_PATH:-$(policy_of 8k 1040)}
        ;;
    24k)
        STEPS=230 N=16 SAVE_FREQ=10 MAX_RESPONSE_LENGTH=24576
        MODEL_PATH=${MODEL_PATH:-$(policy_of 16k 480)}
        ;;
    *)
        echo "error: STAGE=$STAGE is unknown; use 8k, 16k or 24k" >&2
        exit 1
        ;;
esac

DATA=${DATA:-$HOME/data/deepscaler}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-32768}

DATA_ARGS=(
    data.train_files="['$DATA/deepscaler.parquet']"
    data.val_files="['$DATA/aime_2024.parquet']"
    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=True
)

ALGORITHM=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
)

REWARD=(
    reward.custom_reward_function.path="'$RECIPES/common/reward.py'"
    reward.custom_reward_function.name=compute_score
)

MODEL_ARGS=(
    actor_rollout_ref.model.path="'$MODEL_PATH'"
    actor_rollout_ref.model.enable_gradient_checkpointing=True
)

ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.entropy_coeff=0.001
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS_PER_GPU"
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.checkpoint.save_contents="[model,optimizer,extra,hf_model]"
    actor_rollout_ref.actor.checkpoint.load_contents="[model,optimizer,extra]"
)

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n="$N"
    actor_rollout_ref.rollout.temperature=0.6
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6
    actor_rollout_ref.rollout.val_kwargs.top_p=0.95
    actor_rollout_ref.rollout.val_kwargs.n="$N"
)

REF=(
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)

TRAINER=(
    trainer.val_before_train=True
    trainer.save_freq="$SAVE_FREQ"
    trainer.test_freq="$SAVE_FREQ"
    trainer.total_training_steps="$STEPS"
    trainer.total_epochs=30
)

launch "$PROJECT" "${MODEL}_$STAGE" \
    "${DATA_ARGS[@]}" \
    "${ALGORITHM[@]}" \
    "${REWARD[@]}" \
    "${MODEL_ARGS[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${REF[@]}" \
    "${TRAINER[@]}" \
    "$@"
