"""LAMB against its definition."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from oktopk.errors import ConfigError
from oktopk.workloads.lamb import Lamb


def problem() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(6, 3), torch.randn(40, 6), torch.randn(40, 3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_two_steps_follow_the_formula():
    model, inputs, targets = problem()
    reference = copy.deepcopy(model).double()
    optimizer = Lamb(model.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in reference.parameters()}
    for number in (1, 2):
        step(model, optimizer, inputs, targets)
        loss = (reference(inputs.double()) - targets.double()).square().mean()
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for p, g in zip(reference.parameters(), gradients, strict=True):
                m, v = moments[p]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.99).add_(0.01 * g * g)
                u = (m / (1 - 0.9**number)) / ((v / (1 - 0.99**number)).sqrt() + 1e-6) + 0.1 * p
                p -= 0.01 * p.norm() / u.norm() * u
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-6)  # float32 against float64


def test_the_step_does_not_depend_on_the_size_of_the_gradient():
    """What makes it fit for sparse gradients: a tensor moves by lr times its own size."""
    for scale in (1.0, 1e-3):
        model, inputs, targets = problem()
        before = model.weight.detach().clone()
        optimizer = Lamb(model.parameters(), lr=0.02)
        (scale * (model(inputs) - targets).square().mean()).backward()
        optimizer.step()
        assert (model.weight - before).norm().item() == pytest.approx(0.02 * before.norm().item(), rel=1e-3)


def test_it_learns_and_its_state_can_be_saved():
    model, inputs, targets = problem()
    optimizer = Lamb(model.parameters(), lr=0.02)
    losses = [step(model, optimizer, inputs, targets) for _ in range(60)]
    assert losses[-1] < losses[0]
    twin = copy.deepcopy(model)
    restored = Lamb(twin.parameters(), lr=0.02)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors
    assert step(model, optimizer, inputs, targets) == step(twin, restored, inputs, targets)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_zero_weights_and_missing_gradients_are_fine():
    weight, unused = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
    optimizer = Lamb([weight, unused], lr=0.1)
    weight.grad = torch.ones(4)
    optimizer.step()
    assert torch.isfinite(weight).all() and weight.abs().sum() > 0 and torch.equal(unused, torch.ones(4))
    with pytest.raises(ConfigError, match="betas"):
        Lamb([weight], betas=(1.0, 0.9))
