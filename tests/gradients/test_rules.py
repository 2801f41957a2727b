"""How a rule says what it does not cover, and what becomes of a rule with a defect."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.fallback import InternalError
from qualms.gradients.tracing.op_call import OpCall
from qualms.gradients.tracing.rules.table import RULES, find_rule

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)).eval()


def norms(of: nn.Module, x: Tensor = X) -> Tensor:
    return qualms.class_gradient_norms(of, x).norms


@pytest.mark.parametrize("name", ["add", "add_", "__radd__", "__iadd__"])
def test_spellings_of_an_operation_have_one_rule(name: str) -> None:
    assert find_rule(name) is find_rule("add")


def test_an_unknown_operation_has_no_rule() -> None:
    assert find_rule("fft") is None


def test_what_a_rule_does_not_cover_is_exact_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    want = norms(model())

    def covers_nothing(call: OpCall, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented

    for name in ("linear", "layer_norm"):
        monkeypatch.setitem(RULES, name, covers_nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        have = norms(model())
    torch.testing.assert_close(have, want)


def test_an_operation_that_takes_one_row_only_at_a_time_is_exact() -> None:
    class Picky(nn.Module):
        """Its scale is not broadcast but matched row by row."""

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.fc = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = [torch.dot(row, self.scale) * row for row in x]
            return self.fc(torch.stack(rows))

    torch.manual_seed(0)
    picky = Picky().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qualms.SlowWarning)
        have = norms(picky)
    want = qualms.class_gradient_norms(picky, X, engine="reference").norms
    torch.testing.assert_close(have, want.to(have), rtol=1e-4, atol=1e-6)


def test_a_defect_in_a_rule_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qualms.gradients.tracing.rules.linear.Summed", None)
    with pytest.raises(InternalError, match="the rule for linear failed"):
        norms(model())


def test_a_defect_in_a_gradient_is_an_error_that_names_its_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("qualms.gradients.tracing.outer_product.sum_of_squares")
    with pytest.raises(InternalError, match=r"the gradient of 0\.weight failed"):
        norms(model())
