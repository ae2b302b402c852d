# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the families with a vision tower share: names of the published classes, positions of mRoPE."""

from dataclasses import dataclass
from typing import Any

from jetrl_verl.models.families.base import Family, UnsupportedLayer, read, read_whole


@dataclass(frozen=True)
class VisionFamily(Family):
    """A decoder that is the ``language_model`` of a model with a vision tower.

    Attributes:
        interleaved: how both sides deal the frequencies of a head to the three rows of mRoPE's positions; not
            interleaved: by sections.
    """

    layers: str = "model.language_model.layers"
    final_norm: str = "model.language_model.norm"
    rotary_embedding: str = "model.language_model.rotary_emb"
    embedding: str = "model.language_model.embed_tokens"
    rollout_prefixes: tuple[tuple[str, str], ...] = (
        ("model.language_model.", "language_model.model."),
        ("model.visual.", "visual."),
        ("lm_head", "language_model.lm_head"),
    )
    tower: str = "model.visual"
    interleaved: bool = True

    def position_rows(self, config: Any) -> list[int]:
        """For each column of the rotary table, cosines first, the row of mRoPE's positions (time, height, width)."""
        sections = read(config, "rope_parameters")["mrope_section"]
        if self.interleaved:
            rows = [0] * sum(sections)
            for row in (1, 2):
                rows[row : 3 * sections[row] : 3] = [row] * len(range(row, 3 * sections[row], 3))
        else:
            rows = [row for row, count in enumerate(sections) for _ in range(count)]
        return rows * 2

    def check(self, config: Any) -> None:
        super().check(config)
        if read_whole(config, "text_config") is None:
            raise UnsupportedLayer(
                "it is a text model alone (no text_config), of which verl and vLLM have no class", "model_type"
            )
        rope = read(config, "rope_parameters", {})
        interleaved = bool(rope.get("mrope_interleaved", False))
        if "mrope_section" not in rope or interleaved != self.interleaved:
            raise UnsupportedLayer(
                f"it has the rope_parameters {rope}, of which Hugging Face's class reads no mrope_interleaved and "
                f"computes {str(self.interleaved).lower()}",
                "fields_of_vllm",
            )
        trainers, vllms = (of(config, "tie_word_embeddings", False) for of in (read_whole, read))
        if trainers != vllms:
            raise UnsupportedLayer(
                f"tie_word_embeddings is {str(trainers).lower()} in its configuration, which the trainer reads, and "
                f"{str(vllms).lower()} in its text_config, which vLLM reads",
                "tied_in_one_part",
            )
