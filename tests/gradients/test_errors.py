"""Whatever a user gets wrong is said in one sentence."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qualms
from tests import networks as net


class Returns(nn.Module):
    """A linear model whose output goes through a function."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.fc, self.change = nn.Linear(4, 3), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.fc(x))


def frozen_script() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.freeze(torch.jit.script(nn.Linear(4, 3).eval()))


X = torch.randn(2, 4)
LINEAR = nn.Linear(4, 3)
WRONG: dict[str, tuple[nn.Module, Any, dict[str, Any], str]] = {
    "empty batch": (LINEAR, torch.zeros(0, 4), {}, "empty batch"),
    "no batches": (LINEAR, [], {}, "no batch"),
    "nan among numbers": (
        nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 3)),
        torch.tensor([0.0, 1.0, float("nan")]),
        {},
        "input 2 of x .* NaN",
    ),
    "nan input": (LINEAR, torch.tensor([[0.0] * 4, [float("nan")] * 4]), {}, "input 1 of x .* NaN"),
    "nan logits": (Returns(lambda z: z / 0 - z / 0), X, {}, "logits of input 0 .* NaN or infinity"),
    "infinite logits": (Returns(lambda z: z * float("inf")), X, {}, "NaN or infinity"),
    "no logits": (Returns(lambda z: "a label"), X, {}, "returns a str without logits"),
    "labels, not logits": (Returns(lambda z: z.argmax(1)), X, {}, "without logits"),
    "one logit": (Returns(lambda z: z[:, :1]), X, {}, r"shape \(1, 1\) .* two or more classes"),
    "logits per token": (Returns(lambda z: z[:, None]), X, {}, r"shape \(1, 1, 3\)"),
    "no parameter selected": (
        LINEAR,
        X,
        {"params": "layer4.*"},
        "no parameter matches .*names look like weight",
    ),
    "no parameters": (nn.Softmax(-1), X, {}, "has no parameters"),
    "unused parameter": (
        Returns(lambda z: z),
        X,
        {"params": lambda n: n == "spare"},
        "no parameter matches",
    ),
    "wrong shape": (LINEAR, torch.randn(2, 5), {}, r"does not accept x of \(1, 5\) float32: .*"),
    "wrong dtype": (LINEAR, X.double(), {}, r"does not accept x of \(1, 4\) float64"),
    "other device": (LINEAR, X.to("meta"), {}, "parameters are on cpu, but x is on meta"),
    "no path": (Returns(lambda z: z.detach()), X, {}, "do not depend differentiably"),
    "in place": (
        Returns(lambda z: z.sigmoid().mul_(2) * z.tanh().add_(1)),
        X,
        {},
        "cannot be differentiated",
    ),
    "not a model": (lambda x: x, X, {}, "model is a function; pass a torch.nn.Module"),  # type: ignore[dict-item]
    "lazy buffer": (
        nn.Sequential(LINEAR, nn.LazyBatchNorm1d(affine=False)),
        X,
        {},
        "buffer 1.running_mean belongs to",
    ),
    "lazy": (
        nn.LazyLinear(3),
        X,
        {},
        "parameter weight belongs to a lazy module.* no shape yet; run the model once",
    ),
    "frozen script": (frozen_script(), X, {}, "has no parameters"),
    "not inputs": (LINEAR, 3, {}, "x is a int"),
    "sizes disagree": (LINEAR, (X, X[:1]), {}, r"differ in the number of inputs: \[1, 2\]"),
    "unknown layers": (
        LINEAR,
        X,
        {"layers": "modul"},
        "layers='modul' is invalid; choose one of module",
    ),
    "unknown norm": (LINEAR, X, {"norm": "l3"}, "choose one of l2, l1"),
    "unknown engine": (LINEAR, X, {"engine": "fast"}, "choose one of exact, reference"),
    "negative sigma": (LINEAR, X, {"smoothing": -1.0}, "must be a positive number"),
    "no draws": (
        LINEAR,
        X,
        {"smoothing": (0.1, 0)},
        "draws 0; it must be a whole number, 1 or more",
    ),
    "sigma per channel": (
        LINEAR,
        X,
        {"smoothing": ((0.1, 0.2), 2)},
        "2 values of sigma, but an input of shape",
    ),
}


@pytest.mark.usefixtures("as_users_meet_it")
@pytest.mark.parametrize(("model", "x", "more", "says"), WRONG.values(), ids=WRONG)
def test_a_clear_sentence(model: nn.Module, x: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(qualms.QualmsError, match=says) as caught:
        qualms.class_gradient_norms(model, x, **more)
    assert "\n" not in str(caught.value)


def test_discrete_input_without_an_embedding_cannot_be_smoothed() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(ids.float())

    with pytest.raises(qualms.QualmsError, match="no embedding of the model reads it"):
        qualms.class_gradient_norms(Counts(), torch.randint(0, 3, (2, 4)), smoothing=0.1)


def test_a_parameter_that_takes_no_part_is_left_out() -> None:
    model = net.mlp()
    model.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    for engine in ("exact", "reference"):
        g = qualms.class_gradient_norms(model, torch.randn(2, 3, 4, 4), engine=engine)
        assert g.layers == ["1", "3", "5"]
    with pytest.raises(qualms.QualmsError, match="uses none of the selected parameters"):
        qualms.class_gradient_norms(model, torch.randn(2, 3, 4, 4), params="spare")


def test_an_exception_without_a_message_is_told_by_its_name() -> None:
    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise RuntimeError

    with pytest.raises(qualms.QualmsError, match="cannot be differentiated: RuntimeError"):
        qualms.class_gradient_norms(Returns(Silent.apply), X)


def test_probabilities_in_place_of_logits_get_one_warning() -> None:
    model, x = Returns(lambda z: z.softmax(-1)), torch.randn(8, 4)
    for work in (
        lambda: qualms.score(model, x, "entropy"),
        lambda: qualms.score(model, x[:1], "regrad", engine="sketch"),
        lambda: qualms.class_gradient_norms(model, x),
        lambda: qualms.class_gradient_gram(model, [x[:1], x]),
        lambda: qualms.score(model.bfloat16(), x.bfloat16(), "entropy"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", qualms.ProbabilitiesWarning)
            work()
        assert [str(c.message).partition(" (")[0] for c in caught] == [
            "the model's outputs look like probabilities"
        ]


def test_logits_log_probabilities_and_rows_of_other_sums_get_no_warning() -> None:
    x = torch.randn(8, 4)
    for change in (
        lambda z: z.log_softmax(-1),
        lambda z: z.sigmoid(),
        lambda z: z.softmax(-1) * 1.001,
        lambda z: z - z.mean(1, keepdim=True) + 1 / 3,  # adds up to 1, with negative ones
        lambda z: torch.cat([z.softmax(-1)[:-1], z[-1:]]),
    ):
        qualms.class_gradient_norms(Returns(change), x)
    qualms.class_gradient_norms(
        Returns(lambda z: z.softmax(-1)).bfloat16(), x[:1].bfloat16() * 0
    )  # one coarse row


def test_log_probabilities_score_like_the_logits() -> None:
    torch.manual_seed(0)
    model, x = Returns(lambda z: z), torch.randn(8, 4)
    methods = ["regrad+layers", "exgrad", "ungrad", "entropy", "msp"]
    want = qualms.compare(model, x, methods)
    model.change = lambda z: z.log_softmax(-1)
    have = qualms.compare(model, x, methods)
    for method in methods:
        torch.testing.assert_close(have[method], want[method])
