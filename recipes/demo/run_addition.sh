#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# The demo as a recipe: GRPO on multi-digit addition with a policy of a million parameters, on a CPU or one GPU.
# Data and policy are made here on the first run, so nothing is downloaded. PRECISION is a row of the table in
# docs/options.md; further arguments are options of `jetrl demo` or Hydra overrides of verl:
#
#   PRECISION=fp8_rollout bash recipes/demo/run_addition.sh --steps 40 actor_rollout_ref.actor.optim.lr=1e-4
#
# The verl command line that this becomes is written in jetrl_verl/tools/demo/overrides.py and kept in the run's run.json.
set -euo pipefail

PRECISION=${PRECISION:-jet_fp8}
OUT=${OUT:-outputs/demo}
CACHE=${CACHE:-outputs/cache}

ARGS=(
    --precision "$PRECISION"
    --out "$OUT"
    --cache "$CACHE"
)

exec "${PYTHON:-python3}" -m jetrl_verl.cli demo "${ARGS[@]}" "$@"
