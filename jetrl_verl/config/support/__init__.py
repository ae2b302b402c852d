# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One table of what is not supported with what, as data; ``table`` has all rows and the functions that ask them.

``options`` is about the ``jetrl`` node alone, ``training``, ``rollout``, ``operations`` and ``algorithms`` about the
composed configuration, ``machine`` about what the driver sees, ``workers`` about what the objects of verl, transformers
and vLLM show. scripts/support_page.py prints the table as docs/support.md.
"""
