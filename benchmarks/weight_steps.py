# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How far the weights that a forward multiplies by move in an update: ``python3 benchmarks/weight_steps.py FOLDER``.

An optimizer moves FP32 masters a little; a forward sees them rounded, to BF16 or to E4M3 qdata in 128x128 blocks. Most
rounded weights do not move at all and the others jump, so what moves is noise of the size of the grid. For steps of
several sizes, of random sign and equal for all weights as AdamW's first steps are: the share of qdata that change, and
the root mean square of the change relative to the weights', of masters, of BF16 weights and of FP8 weights. FOLDER is a
Hugging Face folder; its linear weights get a random place between their BF16 neighbours first, as masters that were
trained for a while have.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file

from jetrl_verl.reference import dequantize_128x128, quantize_128x128
from jetrl_verl.tools.provenance import describe, provenance

STEPS = (5e-6, 1e-5, 2e-5, 4e-5)


def main(folder: Path) -> None:
    """Print a row for each of ``STEPS``."""
    torch.manual_seed(0)
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise SystemExit(f"error: no *.safetensors in {folder}; name a Hugging Face folder")
    weights = [value.float() for file in files for name, value in file.items() if name.endswith("proj.weight")]
    spacing = [torch.exp2(torch.floor(torch.log2(w.abs().clamp_min(1e-30))) - 7) for w in weights]
    masters = [w + (torch.rand_like(w) - 0.5) * step for w, step in zip(weights, spacing)]
    size = sum(float(w.square().sum()) for w in masters)
    count = sum(w.numel() for w in masters)
    print(describe(provenance()))
    print("  step  qdata changed  relative change of masters     BF16      FP8")
    for step in STEPS:
        squares, changed = [0.0, 0.0, 0.0], 0
        for before in masters:
            after = before + step * torch.randn_like(before).sign()
            rounded, rounded_after = before.bfloat16(), after.bfloat16()
            old, new = quantize_128x128(rounded, "fp32"), quantize_128x128(rounded_after, "fp32")
            changed += int((old.qdata.view(torch.uint8) != new.qdata.view(torch.uint8)).sum())
            moves = (
                after - before,
                rounded_after.float() - rounded.float(),
                dequantize_128x128(new) - dequantize_128x128(old),
            )
            squares = [total + float(move.square().sum()) for total, move in zip(squares, moves)]
        masters_move, bf16, fp8 = ((total / size) ** 0.5 for total in squares)
        print(f"{step:6.0e} {changed / count:14.2%} {masters_move:27.2e} {bf16:8.1e} {fp8:8.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder")
    main(parser.parse_args().folder)
