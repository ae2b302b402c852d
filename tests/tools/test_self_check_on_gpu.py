# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor's self-check on a GPU: every backend that runs here has the reference's bits."""

import torch

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch
from jetrl_verl.tools.doctor import self_check


def test_every_available_backend_has_the_references_bits():
    device = torch.device("cuda", 0)
    outcomes = self_check.outcomes(device)
    assert [outcome for outcome in outcomes if outcome.error] == []
    answered = {(outcome.name, outcome.backend) for outcome in outcomes}
    for call in self_check.calls():
        for backend in kernels.OPERATIONS[call.operation].backends[dispatch.platform_of(device)]:
            # vLLM's kernel does not support every number of rows.
            if backend != "vllm_cutlass" and not self_check.why_not(backend):
                assert (call.name, backend) in answered
