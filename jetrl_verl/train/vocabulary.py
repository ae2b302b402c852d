# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Logits of vocabulary entries without a token are masked, as in the rollout, so that padding gets no probability."""

import torch

from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.config.model import padding_words
from jetrl_verl.config.support.table import refuse
from jetrl_verl.nn.chunked_logits import mask_unused
from jetrl_verl.train.feature import Feature


def mask_unused_vocabulary(model: torch.nn.Module, used: int) -> None:
    """Mask vocabulary entries from ``used`` on.

    Args:
        model: a decoder whose output embedding yields logits ``[..., V]``, overwritten in place from now on.
        used: entries with a token, ``len(tokenizer)``.
    """
    head = model.get_output_embeddings()
    if hasattr(head, "used_vocabulary"):  # the shared operation, which may not materialize logits
        head.used_vocabulary = used
    else:
        head.register_forward_hook(lambda module, inputs, logits: mask_unused(logits, used))


class MaskedVocabulary(Feature):
    @classmethod
    def applies(cls, config: JetFSDPEngineConfig) -> bool:
        return config.jetrl_role != "critic"

    def install(self, module: torch.nn.Module) -> None:
        model, head = self.engine.model_config, module.get_output_embeddings()
        if model.tokenizer is None or head is None or head.weight.shape[0] <= len(model.tokenizer):
            return
        tokens = len(model.tokenizer)
        if model.use_fused_kernels:
            # The driver refuses this for a model that it can read (config/model.py).
            refuse("fused_kernels_of_a_padded_vocabulary", **padding_words(head.weight.shape[0] - tokens, model.path))
        mask_unused_vocabulary(module, tokens)
