"""How a rule says what it does not cover, and what becomes of a rule with a defect."""

import re
import warnings
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.fallback import InternalError
from qualms.gradients.tracing.op_call import OpCall
from qualms.gradients.tracing.rules.recurrent_steps import RECURSIONS
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


# Defects.

TRACING = "qualms.gradients.tracing."
SKETCHING = "qualms.gradients.sketching."


def _fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("shapes do not fit")


# What torch raises for wrong shapes, from a frame of torch's as far as anyone can tell.
fails = FunctionType(_fail.__code__, {"__name__": "torch", "__builtins__": __builtins__})


def _lack(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("not implemented for 'Half'")


# As torch raises it: the innermost frame of qualms is the rule's.
lacks = FunctionType(_lack.__code__, {"__name__": "torch", "__builtins__": __builtins__})


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.table(ids).mean(1))


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(x.unflatten(1, (3, 2)))[0][:, -1])


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.LSTMCell(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        zero = x.new_zeros(len(x), 4)
        return self.fc(self.cell(x, (zero, zero))[0])


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.fc = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * self.scale)


def convolution() -> nn.Module:
    layers = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def score_by_sketch(of: nn.Module, x: Tensor) -> None:
    qualms.score(of, x, "regrad", engine="sketch")


# Each family of rules: a network, a name that its rule uses, and what the error calls the rule.
RULES_WITH_DEFECTS = {
    "linear": (model, "linear.get_gradient_edge", "linear"),
    "conv": (convolution, "conv._image_layout", "conv1d"),
    "norm": (model, "norm._run_affine", "layer_norm"),
    "embedding": (Tokens, "embedding.OuterSizes", "embedding"),
    "recurrent": (Steps, "recurrent.shift_steps", "gru"),
    "cell": (Cell, "recurrent._pre_activations", "lstm_cell"),
    "broadcast": (Scale, "broadcast._expand_along_rows", "mul"),
}
# Likewise a name that the gradient uses, and the parameter.
GRADIENTS_WITH_DEFECTS = {
    "linear": (model, "outer_product.sum_of_squares", "0.weight"),
    "conv": (convolution, "rules.conv.extract_windows", "1.weight"),
    "norm": (model, "rules.norm.at_least_float32", "1.weight"),
    "embedding": (Tokens, "rules.embedding.F", "table.weight"),
    "recurrent": (Steps, "outer_product.at_least_float32", "gru.weight_ih_l0"),
    "broadcast": (Scale, "factors.at_least_float32", "scale"),
}
SKETCHES_WITH_DEFECTS = {
    "pass": (model, SKETCHING + "jvp.LogitsAt", "forward_mode"),
    "padding": (Tokens, SKETCHING + "jvp.bind_arguments", "call"),
    "recurrent": (Steps, TRACING + "rules.recurrent_layers.run_layers", "call"),
}


def inputs_of(build: Any) -> Tensor:
    return torch.arange(20).reshape(4, 5) % 9 if build is Tokens else X


@pytest.mark.parametrize("defect", [None, fails], ids=["of type", "of shapes"])
@pytest.mark.parametrize("family", RULES_WITH_DEFECTS)
def test_a_defect_in_a_rule_is_an_error_that_names_it(
    family: str, defect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, name, rule = RULES_WITH_DEFECTS[family]
    monkeypatch.setattr(f"{TRACING}rules.{name}", defect)
    with pytest.raises(InternalError, match=f"the rule for {rule} failed"):
        norms(build(), inputs_of(build))


@pytest.mark.parametrize("defect", [None, fails], ids=["of type", "of shapes"])
@pytest.mark.parametrize("family", GRADIENTS_WITH_DEFECTS)
def test_a_defect_in_a_gradient_is_an_error_that_names_its_parameter(
    family: str, defect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, name, parameter = GRADIENTS_WITH_DEFECTS[family]
    monkeypatch.setattr(TRACING + name, defect)
    with pytest.raises(InternalError, match=f"the gradient of {re.escape(parameter)} failed"):
        norms(build(), inputs_of(build))


def test_a_defect_in_a_backward_pass_of_ours_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = replace(RECURSIONS["gru"], pull=fails)
    monkeypatch.setitem(RECURSIONS, "gru", broken)
    with pytest.raises(InternalError, match=r"recurrent_layers\.backward failed"):
        norms(Steps())


@pytest.mark.parametrize("part", SKETCHES_WITH_DEFECTS)
def test_a_defect_in_a_sketch_is_an_error_that_names_it(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, name, function = SKETCHES_WITH_DEFECTS[part]
    monkeypatch.setattr(name, None)
    with pytest.raises(InternalError, match=rf"\.{function} failed"):
        score_by_sketch(build(), inputs_of(build))


def test_a_defect_in_a_forward_rule_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TRACING + "rules.recurrent_layers.shift_steps", fails)
    with pytest.raises(InternalError, match=r"recurrent_layers\.jvp failed"):
        score_by_sketch(Steps(), X)


def test_what_torch_lacks_for_a_dtype_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    want = norms(model())
    monkeypatch.setattr(f"{TRACING}rules.{RULES_WITH_DEFECTS['linear'][1]}", lacks)
    with pytest.warns(qualms.SlowWarning, match="not implemented for 'Half'"):
        have = norms(model())
    torch.testing.assert_close(have, want)
