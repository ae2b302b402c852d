#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by every recipe's script: precision, machines, the trainer's attention, and where a run writes.
#
#   PRECISION      a row of docs/options.md: the only difference between baselines and Jet-RL
#   NNODES         machines of the Ray cluster           GPUS_PER_NODE  GPUs of each
#   ATTENTION      jetrl_varlen (the plugin's); flash_attention_2 (verl's default, needs flash-attn); or sdpa (torch's,
#                  pads sequences, no sequence parallelism)
#   OUT            folder for checkpoints and metrics, seen by every machine
#   LOGGER         verl's trackers, e.g. '["console","file","wandb"]'
#   PYTHON         interpreter of the driver
PRECISION=${PRECISION:-jet_fp8}
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
ATTENTION=${ATTENTION:-jetrl_varlen}
OUT=$(realpath -m "${OUT:-outputs/recipes}")
LOGGER=${LOGGER:-'["console","file"]'}
PYTHON=${PYTHON:-python3}

RECIPES=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")

# Ulysses sequence parallelism of $1 ranks; 1 with sdpa, which does not support it.
sequence_parallel() {
    [[ $ATTENTION == sdpa ]] && echo 1 || echo "$1"
}

# launch PROJECT EXPERIMENT [override ...]: replace this shell by verl's trainer. The last of two equal overrides wins.
launch() {
    local project=$1 experiment=$2-$PRECISION
    local run=$OUT/$project/$experiment
    shift 2

    local word
    for word in "$@"; do
        # `jetrl compare` passes both, with equal values.
        if [[ $word =~ ^[+~]*precision(=(.*))?$ && ${BASH_REMATCH[2]} != "$PRECISION" ]]; then
            echo "error: $word would leave the run named after $PRECISION; set PRECISION=${BASH_REMATCH[2]:-bf16}" >&2
            exit 1
        fi
    done

    local attention
    case $ATTENTION in
        jetrl_varlen)
            attention=(
                actor_rollout_ref.model.use_remove_padding=True
                ++actor_rollout_ref.model.override_config.attn_implementation=jetrl_varlen
            )
            ;;
        flash_attention_2)
            "$PYTHON" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("flash_attn"))' || {
                echo "error: flash-attn is not installed; run \`pip install flash-attn --no-build-isolation\`" \
                    "or set ATTENTION=jetrl_varlen, which needs nothing else" >&2
                exit 1
            }
            attention=(actor_rollout_ref.model.use_remove_padding=True)
            ;;
        sdpa)
            attention=(
                actor_rollout_ref.model.use_remove_padding=False
                ++actor_rollout_ref.model.override_config.attn_implementation=sdpa
            )
            ;;
        *)
            echo "error: ATTENTION=$ATTENTION is unknown; use jetrl_varlen, flash_attention_2 or sdpa" >&2
            exit 1
            ;;
    esac

    # verl's file tracker overwrites its file, so a resumed run gets another name. The path travels in Ray's runtime
    # environment, because the process that writes it may run on any machine of the cluster.
    local metrics=${METRICS:-$run/metrics-$(date +%Y%m%d-%H%M%S).jsonl}
    mkdir -p "$(dirname "$metrics")"

    local run_overrides=(
        precision="$PRECISION"
        trainer.nnodes="$NNODES"
        trainer.n_gpus_per_node="$GPUS_PER_NODE"
        trainer.project_name="$project"
        trainer.experiment_name="$experiment"
        trainer.default_local_dir="'$run'"
        trainer.logger="$LOGGER"
        ++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="'$metrics'"
    )
    exec "$PYTHON" -m verl.trainer.main_ppo "${run_overrides[@]}" "${attention[@]}" "$@"
}
