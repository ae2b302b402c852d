# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that a worker alone sees, since no file and no process of the driver's machine shows them; and rows about the
commands of ``jetrl``.

The driver asks the model on the meta device, and vLLM's registries where another package has a plugin for vLLM
(``config/built.py``, ``config/vllm_plugins.py``). A worker asks again what it has built.
"""

from .row import Row, Scope
from .scopes import FP8_ROLLOUT, SHARED, VARLEN, VLLM

WORKER_ROWS: dict[str, Row] = {
    # Another node's environment may have a plugin that the driver's lacks, and any module may assign a class anew.
    "operation_replaced_in_vllm": Row(
        "an operation, attention or sampler of vLLM that other code replaced, on another node or without a registry",
        "what it computes is not known",
        scope=SHARED,
    ),
    "layer_replaced_in_vllm": Row(
        "a linear layer or mixture of experts of vLLM that other code replaced, on another node or without a registry",
        "it is not the one whose layout and sums the trainer has",
        scope=FP8_ROLLOUT,
    ),
    # The driver reads neither remote data nor the samples of a dataset class or a tool.
    "images": Row(
        "samples with images that the driver has not seen in the data, with video or audio",
        "both sides compute the positions of text alone",
        instead=f"Set +{VLLM}.language_model_only=false for images, or precision=bf16",
    ),
    # precision=bf16 has no check in the driver, and what a layer passes to its attention shows in a forward alone.
    "varlen_call": Row(
        "a call of this attention with a mask, cache, scores, direction or positions of its own, as under "
        "precision=bf16",
        "it computes causal attention within each sequence",
        scope=VARLEN,
    ),
}

COMMAND_ROWS: dict[str, Row] = {
    "model_of_a_command": Row(
        "a model of a type that has no family",
        scope=Scope("jetrl diff and jetrl memory"),
        instead="Set a model of one of these types",
    ),
    "hybrid_of_diff": Row(
        "a hybrid of delta nets and attention",
        "a delta net of stock operations has no parts that can be recorded",
        scope=Scope("jetrl diff of stock operations"),
        instead="Set precision=jet_fp8_exact",
    ),
    "reward_model_of_compare": Row(
        "a reward model",
        "it scores with a reward function",
        scope=Scope("jetrl compare"),
        instead="Set reward.custom_reward_function, or use data with a rule",
    ),
}
