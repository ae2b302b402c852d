#!/usr/bin/env bash
# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
# Everything that only a Hopper GPU can answer, part by part: what is right, how fast it is, how far both sides are apart.
#
#   benchmarks/on_gpu.sh OUT [part ...]      # all parts below in this order, about an hour and a half on one H200
#   benchmarks/on_gpu.sh OUT operations gemm
#
# A part has a time limit, its output goes to OUT/<part>.log and its figures to OUT/<part>.json where it has any; a part
# that fails does not stop the others. The last lines are a table of exit statuses. Run it where `python3` has torch,
# verl, vLLM and this plugin; what needs csrc/ says so where it is not built.
set -u
(($#)) || { echo "usage: benchmarks/on_gpu.sh OUT [part ...]" >&2; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2  # before the cd below: a relative OUT is the caller's
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
statuses=()

# part LIMIT_S NAME COMMAND...
part() {
    local limit=$1 name=$2 start=$SECONDS
    shift 2
    [[ " ${chosen[*]} " == *" $name "* ]] || return 0
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    statuses+=("$(printf '%-14s status %3d  %4d s' "$name" $? $((SECONDS - start)))")
}

test_files() { python3 -m pytest --gpu=only -q --maxfail=5 --timeout=280 "$@"; }
sanitizer() {  # memory, then races, a small call of every kernel each; races in the debug build (csrc/pipeline.cuh)
    local debug=0
    for tool in memcheck racecheck; do
        [[ $tool = memcheck ]] || { debug=1; python3 scripts/build_csrc.py --debug || return; }
        JETRL_NATIVE_DEBUG=$debug compute-sanitizer --tool "$tool" --error-exitcode 9 \
            --target-processes application-only python3 -m pytest --gpu=only -q -k sanitizer \
            tests/kernels/test_native_gemm_on_gpu.py tests/kernels/test_native_qdata_on_gpu.py \
            tests/kernels/test_fused_quantizers_on_gpu.py tests/kernels/test_experts_on_gpu.py \
            tests/kernels/test_kv_cache_on_gpu.py tests/kernels/test_decode_attention_bf16_on_gpu.py || return
    done
}
sustained() {  # 80 s a shape
    for shape in fprop/qwen3-8b/gate_up/16384 wgrad/qwen3-8b/gate_up/16384/fp32; do
        python3 -m jetrl_verl.cli bench gemm --what ${shape%%/*} --tokens 4096 --contenders bf16,native,deep_gemm \
            --sustained 20 --sustained-shape $shape --out "$out/sustained_${shape%%/*}.json" || return
    done
}
demo() {  # every step one update, so that actor/ppo_kl is that of the rollout's own policy
    python3 -m jetrl_verl.cli demo --precision "$1" --steps 3 --out "$out/demo" \
        actor_rollout_ref.actor.ppo_mini_batch_size=32
}
diff_precisions() {
    python3 - "$out/policy" <<'P'
import sys
from pathlib import Path
from jetrl_verl.tools.demo.policy import PolicyConfig, build_model, build_tokenizer, save_policy
tokenizer = build_tokenizer()
shape = PolicyConfig(hidden_size=768, layers=4, heads=6, kv_heads=2, intermediate_size=3072, max_positions=1024)
save_policy(build_model(shape, tokenizer), tokenizer, Path(sys.argv[1]))
P
    python3 -m jetrl_verl.cli diff "$out/policy" --precision jet_fp8_exact --out "$out/diff/jet_fp8_exact" || return
    for precision in "jet_fp8 jetrl.operations=stock" fp8_rollout bf16; do
        # shellcheck disable=SC2086  # a precision and its overrides
        python3 -m jetrl_verl.cli diff "$out/policy" --precision $precision --out "$out/diff/${precision%% *}"
    done
    true  # these differ, which is their point
}
export -f test_files sanitizer sustained demo diff_precisions
export out

parts=(operations quantizers gemms experts sanitizer gemm sustained chain mixture variants linear mlp ranks products
    cachetests decodetests cache prompts behind quant full exact exact8k families cost mismatch demo diff decode phases)
if (($#)); then chosen=("$@"); else chosen=("${parts[@]}"); fi
for name in "${chosen[@]}"; do
    [[ " ${parts[*]} " == *" $name "* ]] || { echo "$name is not a part; choose from: ${parts[*]}" >&2; exit 2; }
done

part 300 operations bash -c 'test_files tests/kernels/test_shared_operations_on_gpu.py \
    tests/kernels/test_logits_over_ranks_on_gpu.py tests/kernels/test_draw_on_gpu.py'
part 500 quantizers bash -c 'test_files tests/kernels/test_*quant*_on_gpu.py tests/kernels/test_native_qdata_on_gpu.py \
    tests/kernels/test_fprop_on_gpu.py'
part 600 gemms bash -c 'test_files tests/kernels/test_*gemm*_on_gpu.py tests/kernels/test_int8*_on_gpu.py tests/checkpoint'
part 300 experts bash -c 'test_files tests/kernels/test_experts_on_gpu.py'
part 600 sanitizer bash -c sanitizer
part 600 gemm python3 -m jetrl_verl.cli bench gemm --out "$out/gemm.json"
part 600 sustained bash -c sustained
part 300 chain python3 benchmarks/decode_chain_on_gpu.py --timeline --out "$out/chain.json"
part 150 mixture python3 benchmarks/experts_on_gpu.py --timeline --out "$out/mixture.json"
part 180 variants python3 benchmarks/experts_variants_on_gpu.py --out "$out/variants.json"
part 300 linear python3 -m jetrl_verl.cli bench linear --out "$out/linear.json"
part 200 mlp python3 benchmarks/gated_mlp_on_gpu.py --out "$out/mlp.json"
part 200 ranks python3 benchmarks/ranks_on_gpu.py --out "$out/ranks.json"
part 300 products python3 benchmarks/experts_gemm_on_gpu.py --out "$out/products.json"
part 300 cachetests bash -c 'test_files tests/kernels/test_kv_cache_on_gpu.py'
part 200 decodetests bash -c 'test_files tests/kernels/test_decode_attention_bf16_on_gpu.py'
part 240 cache python3 benchmarks/kv_cache_on_gpu.py --out "$out/cache.json"
part 240 prompts python3 benchmarks/kv_cache_prompts_on_gpu.py --out "$out/prompts.json"
part 150 behind python3 benchmarks/behind_last_layer_on_gpu.py --out "$out/behind.json"
part 300 quant python3 -m jetrl_verl.cli bench quant --rules fp32,pow2 --out "$out/quant.json"
part 600 full python3 -m jetrl_verl.cli bench gemm --full --out "$out/full.json"
part 300 exact python3 benchmarks/mismatch.py --rollouts exact,exact-stressed --folder "$out/warm" --out "$out/exact.json"
part 400 exact8k python3 benchmarks/mismatch.py --rollouts exact --prompts 32 --response 8000 --folder "$out/warm" \
    --out "$out/exact8k.json"
part 600 families bash -c 'test_files tests/rollout'
part 400 cost python3 benchmarks/exact_cost_on_gpu.py --out "$out/cost.json"
part 400 mismatch python3 benchmarks/mismatch.py --folder "$out/warm" --out "$out/mismatch.json"
part 500 demo bash -c 'demo jet_fp8_exact; status=$?; demo jet_fp8 && exit $status'
part 500 diff bash -c diff_precisions
part 500 decode python3 benchmarks/decode_on_gpu.py --behind-last-layer --out "$out/decode.json"
part 900 phases python3 benchmarks/phase_shares_on_gpu.py --out "$out/phases.json"

printf '%s\n' "${statuses[@]}"
