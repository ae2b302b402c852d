# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS (36B): biases on q, k and v, more attention features than hidden ones (80 heads of 128 over 5120), dropout.

Hugging Face's class reads three switches for biases from the configuration, vLLM's has them built in: q, k and v with
one, all others without. vLLM's loader passes over a bias that it has no place for, and leaves one that never arrives
as it was allocated, so a model with other switches is refused here.

The published configuration trains with dropout (0.1) behind attention's softmax and behind both halves of a layer. A
rollout has none, so the shared operations want both rates set to 0 in the trainer's copy.
"""

from typing import Any

from jetrl_verl.models.families.base import Family, UnsupportedLayer, read


class SeedOss(Family):
    def check(self, config: Any) -> None:
        for name, built_in in (("attention_bias", True), ("attention_out_bias", False), ("mlp_bias", False)):
            if read(config, name, built_in) != built_in:
                raise UnsupportedLayer(
                    f"it has {name}={str(not built_in).lower()}, and vLLM's class has {str(built_in).lower()} built in",
                    "built_in_biases",
                )


FAMILY = SeedOss("seed_oss", dropouts=("attention_dropout", "residual_dropout"))
