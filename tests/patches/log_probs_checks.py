# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Log-probabilities of chunks of rows against verl's loop over single rows, on any device."""

import torch

from jetrl_verl.patches import log_probs


def verls_own():
    """verl's function, whatever has been put in its place."""
    import importlib.util

    spec = importlib.util.find_spec("verl.utils.torch_functional")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.logprobs_from_logits_v2


def check(device: str, dtype: torch.dtype, autocast: bool, shape: tuple[int, ...], monkeypatch) -> None:
    """Values, their type and gradients are equal bit for bit, over several chunks."""
    vocabulary = shape[-1]
    monkeypatch.setattr(log_probs, "_CHUNK_ELEMENTS", 7 * vocabulary + 1)
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(shape, generator=generator) * 6).to(device, dtype)
    labels = torch.randint(0, vocabulary, shape[:-1], generator=generator).to(device)
    upstream = torch.randn(shape[:-1], generator=generator).to(device)
    results = []
    for function in (verls_own(), log_probs.log_probs_of_rows):
        leaf = logits.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            values = function(leaf, labels)
        (values * upstream).sum().backward()
        results.append((values.detach(), leaf.grad))
    (stock, stock_gradient), (ours, our_gradient) = results
    assert ours.dtype == stock.dtype and ours.shape == stock.shape
    assert torch.equal(ours, stock)
    assert torch.equal(our_gradient, stock_gradient)
