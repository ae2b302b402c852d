#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
# Resolve constraints/{cpu,gpu}.in into constraints/{cpu,gpu}.txt: every package pinned, no URLs.
# One list for both Pythons: resolved for the older one, and the newer one must accept the same pins.
set -euo pipefail
cd "$(dirname "$0")/../constraints"
uv=../.venv/bin/uv
quiet="$(mktemp)"
trap 'rm -f "$quiet"' EXIT

for stack in cpu gpu; do
  words=("$stack.in" --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --no-emit-index-url --quiet)
  [[ $stack == cpu ]] && words+=(--override cpu.overrides.txt)
  "$uv" pip compile "${words[@]}" --python-version 3.11 --upgrade --output-file "$stack.txt"
  "$uv" pip compile "${words[@]}" --python-version 3.12 --constraint "$stack.txt" --output-file "$quiet"
  diff "$stack.txt" "$quiet" || { echo "constraints/$stack.txt does not fit Python 3.12 (see above)"; exit 1; }
  echo "constraints/$stack.txt: $(wc -l < "$stack.txt") packages"
done
