# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, from a file or built in."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jetrl_verl.config.data import media_of
from jetrl_verl.inputs import UserError, load_json, reading, reason_of

BUILT_IN = (
    "What is 7841 + 2259? Work it out digit by digit.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain each step.",
    "Write a short poem about a river that forgets where it came from.",
    "List the first ten prime numbers and say why 1 is not among them.",
)


@dataclass(frozen=True)
class Prompts:
    """Token ids of each prompt, ids that end a response, entries with a token, positions of the model, and the
    placeholders of images and videos, which verl never samples."""

    ids: list[list[int]]
    stop: list[int]
    vocabulary: int
    positions: int
    banned: list[int]


def _rows(file: Path, limit: int) -> list[Any]:
    """The first ``limit`` prompts of a file: strings, lists of chat messages, or token ids."""
    kinds = "lines of text (.txt), objects with prompt or prompt_token_ids (.jsonl), verl's column prompt (.parquet)"
    with reading(file, "file of prompts", f"Give {kinds}"):
        if file.suffix == ".parquet":
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(file) as table:
                columns = [name for name in ("prompt", "images") if name in table.schema_arrow.names]
                batches = table.iter_batches(limit, columns=columns)  # not the images of the whole file
                rows = list(islice((row for batch in batches for row in batch.to_pylist()), limit))
        else:
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()][:limit]
            if file.suffix != ".jsonl":
                return lines
            rows = [json.loads(line) for line in lines]
        prompts = [row["prompt_token_ids"] if "prompt_token_ids" in row else row["prompt"] for row in rows]
        images = any(media_of(row, "prompt", ("images",), images=True) for row in rows)
    if images:
        raise UserError(f"{file} has images, which jetrl diff does not compare; give prompts of text alone.")
    return prompts


def _encode(row: Any, tokenizer: Any) -> list[int]:
    if isinstance(row, list) and all(isinstance(token, int) for token in row):
        return row
    if not (isinstance(row, str) or isinstance(row, list) and all(isinstance(part, dict) for part in row)):
        raise UserError(
            f"{repr(row)[:60]} is not a prompt; give text, chat messages with role and content, or token ids."
        )
    if tokenizer is None:
        raise UserError("the model folder has no tokenizer; give --prompts a .jsonl with prompt_token_ids.")
    if tokenizer.chat_template is None:
        if isinstance(row, str):
            return tokenizer.encode(row)
        raise UserError(
            "the model's tokenizer has no chat template for chat messages; give --prompts lines of text (.txt) or a "
            ".jsonl with prompt_token_ids."
        )
    messages = [{"role": "user", "content": row}] if isinstance(row, str) else row
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # templates raise any exception
        raise UserError(
            f"the model's chat template does not accept {repr(row)[:60]} ({reason_of(error)}); correct the messages or "
            "give prompt_token_ids."
        ) from None


def _load(model: Path) -> tuple[Any, Any, list[int]]:
    """The decoder's config and the tokenizer of the folder ``model``, None without a tokenizer, and placeholders of
    its processor."""
    from transformers import AutoConfig, AutoTokenizer
    from verl.utils.tokenizer import hf_processor
    from verl.workers.rollout.utils import get_vision_placeholder_token_ids

    with reading(model, "model folder", "Name a complete Hugging Face folder"):
        load_json(model / "config.json")  # of what transformers says about a missing one, nothing names the file
        has_tokenizer = any((model / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True) if has_tokenizer else None
        processor = hf_processor(str(model)) if has_tokenizer and hasattr(config, "vision_config") else None
        return config.get_text_config(), tokenizer, get_vision_placeholder_token_ids(processor)


def read_prompts(model: Path, file: Path | None, limit: int) -> Prompts:
    """The first ``limit`` prompts for the model in folder ``model``, through its chat template where it has one.

    Raises:
        UserError: model, prompts, tokenizer or template are missing or damaged, or ids are outside the vocabulary.
    """
    config, tokenizer, banned = _load(model)
    rows = list(BUILT_IN[:limit]) if file is None else _rows(file, limit)
    ids = [_encode(row, tokenizer) for row in rows]
    vocabulary = config.vocab_size if tokenizer is None else min(len(tokenizer), config.vocab_size)
    if not ids or not all(ids):
        raise UserError(f"{file} has no prompt, or an empty one; remove empty rows.")
    if any(not 0 <= token < vocabulary for row in ids for token in row):
        raise UserError(f"{file} has token ids outside the model's {vocabulary} tokens; use its own tokenizer.")
    stop = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Prompts(ids, stop, vocabulary, config.max_position_embeddings, banned)
