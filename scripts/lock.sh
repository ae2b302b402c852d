#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
# Resolve constraints/*.in, one for each stack and version of vLLM, into constraints/*.txt: every package pinned, no URLs.
# One list for both Pythons: resolved for the older one, and the newer one must accept the same pins.
set -euo pipefail
uv="$(realpath "$1")"
cd "$(dirname "$0")/../constraints"
quiet="$(mktemp)"
trap 'rm -f "$quiet"' EXIT

for file in *.in; do
  lane="${file%.in}"
  words=("$file" --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --no-emit-index-url --quiet)
  [[ -f $lane.overrides.txt ]] && words+=(--override "$lane.overrides.txt")
  # Published for torch's CUDA build alone: next to its CPU build they fail, and nothing here needs them.
  [[ $lane == cpu-0.29 ]] && words+=(--no-emit-package torchvision --no-emit-package torchaudio
                                     --no-emit-package torchcodec)
  "$uv" pip compile "${words[@]}" --python-version 3.11 --upgrade --output-file "$lane.txt"
  "$uv" pip compile "${words[@]}" --python-version 3.12 --constraint "$lane.txt" --output-file "$quiet"
  diff "$lane.txt" "$quiet" || { echo "constraints/$lane.txt does not fit Python 3.12 (see above)"; exit 1; }
  echo "constraints/$lane.txt: $(wc -l < "$lane.txt") packages"
done
