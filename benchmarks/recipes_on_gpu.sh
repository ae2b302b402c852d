#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Every recipe, three steps under each precision, three runs at once on one GPU, and a table:
# benchmarks/recipes_on_gpu.sh OUT [run ...].
# recipes.py beside this file says what a run is. Run it where `python3` has torch, verl, vLLM and this plugin.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.recipes "$@"
