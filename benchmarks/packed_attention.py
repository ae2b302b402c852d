# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One decoder layer on a packed batch, forward and backward: transformers' sdpa, which builds a mask of all tokens by
all tokens, against ``jetrl_varlen``, which builds none.

    python benchmarks/packed_attention.py --out FILE [--tokens 2048,4096,8192] [--length 512] [--device cpu]

A Qwen3 layer with Qwen3-8B's heads (32 of 128 over 8) and hidden size on the GPU, with an eighth of both on a CPU.
Each case runs in a process of its own; seconds are the median of three passes behind a first one, memory is the peak
above what was taken before the passes (resident on a CPU, allocated on a GPU). A minute on two cores.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from jetrl_verl.tools.provenance import provenance

ATTENTIONS = ("sdpa", "jetrl_varlen")
REPETITIONS = 3
MIB = 2**20


def measure(attention: str, tokens: int, length: int, device: str) -> dict[str, float]:
    """Seconds and MiB of a layer's pass over ``tokens`` in sequences of ``length``."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    from jetrl_verl.train.register import register

    register()
    part = 1 if device == "cuda" else 8
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=4096 // part,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=32 // part,
        num_key_value_heads=8 // part,
        head_dim=128,
        max_position_embeddings=tokens,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    model = Qwen3Model(config).to(device, torch.bfloat16)
    ids = torch.randint(0, 128, (1, tokens), device=device)

    def peak() -> float:
        if device == "cuda":
            return torch.cuda.max_memory_allocated() / MIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    before, seconds = peak(), []
    for _ in range(1 + REPETITIONS):
        positions = torch.arange(tokens, device=device)[None] % length
        start = time.perf_counter()
        model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state.float().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[1:]), "peak_mib": peak() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--tokens", default="2048,4096,8192")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    found = []
    for tokens in map(int, options.tokens.split(",")):
        for attention in ATTENTIONS:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                case = pool.submit(measure, attention, tokens, options.length, options.device).result()
            found.append({"attention": attention, "tokens": tokens, "length": options.length} | case)
            print(f"{attention:13} {tokens:6} tokens {case['seconds']:8.3f} s {case['peak_mib']:8.0f} MiB", flush=True)
    with open(options.out, "w") as file:
        json.dump({**provenance(), "device": options.device, "cases": found}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
