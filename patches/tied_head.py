# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A weight sync of a model with a tied head in more than one bucket.

vLLM 0.29 loads a head that is tied under the embedding's name and raises if one call loads the head alone. verl 0.9.1
sends weights in buckets of ``update_weights_bucket_megabytes``, each a call: the embedding is in the first one, the
head in the last. An embedding that an earlier call has loaded now counts.
"""

from typing import Any

from jetrl_verl.patches.patch import Patch


def _check_skipped_aliases(stock, self: Any, autoloaded_weights: set[str]) -> None:
    loaded = self.module.__dict__.setdefault("_tied_weights_loaded", set())
    loaded |= autoloaded_weights.intersection(self.aliased_params.values())
    stock(self, autoloaded_weights | loaded)


EMBEDDING = Patch(
    replaces="vllm.model_executor.models.utils:AutoWeightsLoader._check_skipped_aliases",
    sha256={"0.29.0": "2e069964769d1ab41acf32830676ef23f3a74f7af81e1a30847302c7f7488ad4"},
    by=_check_skipped_aliases,
    symptom="the weight sync of a model with a tied head and more weights than a bucket fails",
    upstream="vLLM takes a call of load_weights for a whole checkpoint; no issue is known",
    until="vLLM checks a checkpoint alone, or verl sends a tied weight once",
    needed=True,
)
PATCHES = (EMBEDDING,)
