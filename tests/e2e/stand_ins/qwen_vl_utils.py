# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What verl calls of the package of this name, where it is not installed: the images of messages, as they are."""

from typing import Any


def process_vision_info(messages: list[dict], **_: Any) -> tuple[list | None, None]:
    """(Images in order or None, no videos)."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"] or None, None
