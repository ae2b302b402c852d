# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One table of what is supported with what, as data.

``row`` says what a row is, ``scopes`` with what a setting may not be supported; the rows are in ``options`` (the
``jetrl`` node alone), ``general``, ``operations`` and ``algorithms`` (the composed configuration), ``machine`` (the
driver), ``workers`` (what only the objects of verl, transformers and vLLM show) and ``commands``; ``table`` puts them
together. The composition check, the driver's check, the workers, ``jetrl.operations=auto`` and the documentation read
it: ``python -m jetrl_verl.config.support`` prints docs/support.md.
"""
