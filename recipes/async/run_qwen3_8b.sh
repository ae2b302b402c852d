#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# GRPO on GSM8K with Qwen3-8B, trainer and rollout on GPUs of their own: ../gsm8k with verl's separate_async. See
# README.md. A step has a batch of parameter_sync_step=4 mini-batches, as ../gsm8k has, and one weight sync.
#   ROLLOUT_GPUS   GPUs of the rollout on one machine; the trainer has GPUS_PER_NODE
set -euo pipefail

GPUS_PER_NODE=${GPUS_PER_NODE:-4} EXPERIMENT=qwen3_8b_async \
    exec bash "$(dirname "${BASH_SOURCE[0]}")/../gsm8k/run_qwen3_8b.sh" \
    trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step=4 \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node="${ROLLOUT_GPUS:-4}" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \
    actor_rollout_ref.rollout.checkpoint_engine.backend=jetrl \
    "$@"
