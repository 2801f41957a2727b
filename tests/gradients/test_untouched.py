"""The model leaves as it came."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qualms
from tests import networks as net
from tests.cases import CASES, Case


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a user could notice."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    return {
        "parameters": [
            (n, id(p), p.requires_grad, p._version, p.detach().clone()) for n, p in model.named_parameters()
        ],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "buffers": [(n, id(b), b.clone()) for n, b in model.named_buffers()],
        "training": [m.training for m in model.modules()],
        "hooks": [{h: list(getattr(m, h)) for h in hooks} for m in model.modules()],
        "attributes": [
            {k: id(v) if isinstance(v, Tensor) else None for k, v in vars(m).items()} for m in model.modules()
        ],
        "random": torch.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "engine",
    ["exact", "reference", pytest.param(qualms.Sketch(2), marks=pytest.mark.slow)],
    ids=["exact", "reference", "sketch"],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_changes(case: Case, engine: str | qualms.Sketch) -> None:
    model, x = case.make()
    if not isinstance(model, torch.fx.GraphModule):
        model.train()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = fingerprint(model)
    kept = copy.deepcopy(x)
    qualms.class_gradient_norms(model, x, smoothing=(0.1, 2), engine=engine)
    after = fingerprint(model)
    for key in before:
        assert same(before[key], after[key]), key
    assert same(kept, x)


def test_nothing_changes_after_an_error() -> None:
    model, x = net.mlp().train(), torch.randn(2, 7)
    before = fingerprint(model)
    with pytest.raises(qualms.QualmsError):
        qualms.class_gradient_norms(model, x)
    assert all(same(before[key], fingerprint(model)[key]) for key in before)


def test_a_buffer_that_the_model_itself_writes_is_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(x)

    model = Counting()
    qualms.class_gradient_norms(model, torch.randn(2, 4))
    assert model.calls == 0


def test_it_works_under_no_grad_and_inference_mode() -> None:
    model, x = net.mlp(), torch.randn(3, 3, 4, 4)
    want = qualms.class_gradient_norms(model, x).norms
    with torch.no_grad():
        assert torch.equal(qualms.class_gradient_norms(model, x).norms, want)
    with torch.inference_mode():
        assert torch.equal(qualms.class_gradient_norms(model, x.clone()).norms, want)
