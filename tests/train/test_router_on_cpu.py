# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture in a whole model: transformers' load-balancing loss, its gradients, and checkpointing."""

import copy

import pytest
import torch
from tiny_models import tiny_model, with_preferences

from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.train.shared_operations import share_operations

IDS = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def shared():
    """A two-layer mixture in the flow, with shared operations, in BF16 as FSDP shows it to a forward."""
    model = with_preferences(tiny_model("qwen3_moe", 4)).to(torch.bfloat16)
    replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    share_operations(model)
    return model


def balance(logits: list[torch.Tensor], experts: int, k: int) -> torch.Tensor:
    """Switch's loss (arXiv 2101.03961, equations 4 to 6) over all layers' tokens: E times the sum over experts of
    the share of pairs times the mean probability, in FP64."""
    probabilities = torch.cat([rows.double() for rows in logits]).softmax(dim=-1)
    chosen = torch.cat([rows.detach() for rows in logits]).topk(k, dim=-1).indices
    shares = torch.nn.functional.one_hot(chosen, experts).double().mean(dim=0)
    return experts * (shares * probabilities.mean(dim=0)).sum()


def test_the_load_balancing_loss_is_that_of_the_routers_logits(shared):
    outputs = shared(input_ids=IDS, output_router_logits=True)
    assert [tuple(logits.shape) for logits in outputs.router_logits] == [(80, 8)] * 2
    assert all(logits.dtype == torch.float32 for logits in outputs.router_logits)
    expected = balance(list(outputs.router_logits), 8, 2)
    assert abs(outputs.aux_loss.double() - expected) < 1e-6 * expected


def test_the_load_balancing_gradient_is_that_of_fp64(shared):
    """Of the last layer's router, where it depends on the loss and the router's input alone."""
    outputs = shared(input_ids=IDS, output_router_logits=True)
    outputs.aux_loss.backward()
    router = shared.model.layers[-1].mlp.gate.weight
    seen = []
    shared.model.layers[-1].mlp.gate.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        shared(input_ids=IDS)
    weight = router.detach().double().requires_grad_()
    logits = [logits.detach() for logits in outputs.router_logits[:-1]] + [seen[0].double() @ weight.t()]
    balance(logits, 8, 2).backward()
    assert weight.grad.norm() > 0
    # The gradient is a BF16 tensor.
    assert (router.grad.double() - weight.grad).norm() < 2**-7 * weight.grad.norm()


def test_checkpointing_changes_no_bit(shared):
    runs = []
    for model in (shared, copy.deepcopy(shared)):
        if runs:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        logits = model(input_ids=IDS).logits
        logits.float().log_softmax(dim=-1)[..., 7].mean().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        runs.append((logits.detach(), gradients))
    (plain, stored), (again, recomputed) = runs
    assert torch.equal(plain, again)
    for name, gradient in stored.items():
        assert gradient is not None and gradient.any(), name
        assert torch.equal(gradient, recomputed[name]), name
