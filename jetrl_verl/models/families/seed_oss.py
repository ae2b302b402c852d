# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS (36B): biases on q, k and v, and two dropout rates, which shared operations require to be 0.

Hugging Face reads three bias switches from the configuration. vLLM has biases on q, k and v built in and no others, and
its loader silently skips or misses any other bias, so other switches are refused.
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
