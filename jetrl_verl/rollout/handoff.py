# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a norm, an activation or a gate in vLLM knows of the quantized linear layer that alone reads its result."""

from jetrl_verl.formats.format import Format


class ReadByLinear:
    """Mixin of vLLM classes whose result may be read by one quantized linear layer alone.

    Attributes:
        reader_format: of that layer; None if there is none, and the result is a BF16 tensor. reader_rule: its rule.
        keeps_rows: whether the BF16 rows go along with the qdata, for a mixture's router or ``jetrl diff``.
    """

    reader_format: Format | None = None
    reader_rule: str | None = None
    keeps_rows = False

    def check(self) -> None:
        """Refuse a layer that the shared operations do not cover."""
