# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Request to an engine of ``jetrl diff`` and the recording that it returns, as files between two processes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jetrl_verl.tools.diff.operations import Operation


@dataclass
class Request:
    """What one engine does.

    Attributes:
        model: Hugging Face folder. jetrl: the ``jetrl`` node of the precision, None for bf16.
        arguments: of ``vllm.LLM``. vocabulary: number of entries with a token; the others are never sampled, nor the
            ``banned`` ones.
        prompts: token ids. response: most tokens to sample. temperature: above 0. stop: ids that end a response.
        responses: tokens to repeat and record; None to sample. out: file that receives the recording.
    """

    model: str
    jetrl: dict[str, Any] | None
    arguments: dict[str, Any]
    vocabulary: int
    banned: list[int]
    prompts: list[list[int]]
    response: int
    temperature: float
    stop: list[int]
    responses: list[list[int]] | None = None
    out: str = ""


@dataclass
class Recording:
    """What an engine did. Tokens are numbered through the concatenated :attr:`sequences`.

    Attributes:
        prompts, responses: token ids.
        log_probs: ``[response tokens]`` FP32, of the concatenated responses.
        outputs: operation -> ``[tokens, features]``; for ``lm_head`` and ``sampler`` ``[response tokens, ...]``.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: torch.Tensor
    outputs: dict[Operation, torch.Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> list[list[int]]:
        """The input of the model: the last token of a response is sampled and never read."""
        return [prompt + response[:-1] for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def drawn(self) -> torch.Tensor:
        """``[response tokens]``: every token that was sampled."""
        return torch.tensor([token for response in self.responses for token in response])

    @property
    def drawing(self) -> torch.Tensor:
        """``[response tokens]``: number of the token from whose logits each was sampled."""
        numbers, start = [], 0
        for prompt, sequence in zip(self.prompts, self.sequences, strict=True):
            numbers += range(start + len(prompt) - 1, start + len(sequence))
            start += len(sequence)
        return torch.tensor(numbers)

    def place(self, token: int) -> tuple[int, int]:
        """(request, position) of a token by its number."""
        for request, sequence in enumerate(self.sequences):
            if token < len(sequence):
                return request, token
            token -= len(sequence)
        raise IndexError(token)

    def save(self, path: str | Path) -> None:
        torch.save(vars(self) | {"outputs": {tuple(key): value for key, value in self.outputs.items()}}, path)

    @classmethod
    def load(cls, path: str | Path) -> "Recording":
        state = torch.load(path, weights_only=True)
        return cls(**state | {"outputs": {Operation(*key): value for key, value in state["outputs"].items()}})
