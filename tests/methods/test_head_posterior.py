"""Last-layer Laplace: against laplace-torch on a trained network, and against its own samples."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from qualms.errors import QualmsError
from qualms.methods.head_posterior import Full, HeadPosterior, Kronecker, Structure, fit_head

BOTH: tuple[Structure, ...] = ("full", "kron")


@cache
def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float64) / 16, torch.tensor(y)


@cache
def trained(bias: bool) -> tuple[nn.Sequential, nn.Linear]:
    """A network that has learnt the first 1000 digits: body and head."""
    torch.manual_seed(0)
    x, y = (t[:1000] for t in digits())
    body, head = (
        nn.Sequential(nn.Linear(64, 24), nn.Tanh()).double(),
        nn.Linear(24, 10, bias=bias).double(),
    )
    model = nn.Sequential(body, head)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return body, head


def random_head(
    inputs: int, classes: int, width: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """Features, logits, weight and bias."""
    torch.manual_seed(0)
    h = torch.randn(inputs, width, dtype=dtype)
    weight, bias = (
        torch.randn(classes, width, dtype=dtype) / width**0.5,
        torch.randn(classes, dtype=dtype),
    )
    return h, h @ weight.mT + bias, weight, bias


@pytest.fixture
def _double() -> Iterator[None]:
    """laplace-torch multiplies its full matrix by torch.eye, so in the default dtype whatever the
    model's.
    """
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# What laplace-torch imports (asdl, linear_operator, torch's own jvp) is still scripted.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("prior_precision", [1.0, 0.01, 30.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", BOTH)
def test_agrees_with_laplace_torch(
    structure: Structure, bias: bool, prior_precision: float
) -> None:
    from laplace import Laplace

    x, y = digits()
    body, head = trained(bias)
    peer: Any = Laplace(
        nn.Sequential(body, head),
        "classification",
        subset_of_weights="last_layer",
        hessian_structure=structure,
        prior_precision=prior_precision,
    )
    peer.fit(DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=300))
    _, want = peer._glm_predictive_distribution(x[1000:])
    batches = ((body(part), head(body(part))) for part in x[:1000].split(128))
    have = fit_head(batches, head.weight, head.bias, prior_precision, structure)
    assert want.dtype == torch.float64
    variance = have.functional_variance(body(x[1000:]))
    torch.testing.assert_close(variance, want, rtol=1e-9, atol=1e-12 * float(want.abs().max()))


def test_full_is_the_gauss_newton_matrix_written_out() -> None:
    h, logits, weight, bias = random_head(30, 4, 3)
    have = fit_head([(h, logits)], weight, bias, 0.7, "full")
    h = torch.cat([h, torch.ones(30, 1)], dim=1)
    p = logits.softmax(1)
    precision = 0.7 * torch.eye(16, dtype=torch.float64)
    for row, q in zip(h, p, strict=True):
        precision += torch.kron(q.diag() - q.outer(q), row.outer(row))
    assert isinstance(have.covariance, Full)
    torch.testing.assert_close(have.covariance.factor @ have.covariance.factor.mT, precision)


@pytest.mark.parametrize("structure", BOTH)
def test_batches_of_any_size_give_the_same_posterior(structure: Structure) -> None:
    h, logits, weight, bias = random_head(2500, 5, 8)
    whole = fit_head([(h, logits)], weight, bias, structure=structure)
    parts = fit_head(
        zip(h.split(7), logits.split(7), strict=True), weight, bias, structure=structure
    )
    torch.testing.assert_close(
        parts.functional_variance(h), whole.functional_variance(h), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", BOTH)
def test_logits_of_samples_vary_as_predicted(structure: Structure, bias: bool) -> None:
    h, logits, weight, b = random_head(200, 4, 6)
    posterior = fit_head([(h, logits)], weight, b if bias else None, structure=structure)
    n, h = 20_000, h[:8]
    weights, biases = posterior.sample(n, seed=3)
    assert (biases is not None) is bias
    sampled = torch.einsum("bf,ncf->bnc", h, weights) + (0 if biases is None else biases)
    mean, variance = h @ weight.mT + (b if bias else 0), posterior.functional_variance(h)
    scale = variance.diagonal(dim1=1, dim2=2)
    assert ((sampled.mean(1) - mean).abs() < 5 * (scale / n).sqrt()).all()
    centered = sampled - mean[:, None]
    # Var(ab) = Σ_aa Σ_bb + Σ_ab² for centered Gaussians.
    bar = ((scale[:, :, None] * scale[:, None] + variance.square()) / n).sqrt()
    assert ((centered.mT @ centered / n - variance).abs() < 5 * bar).all()


@pytest.mark.parametrize("structure", BOTH)
def test_the_seed_decides_the_samples(structure: Structure) -> None:
    h, logits, weight, bias = random_head(50, 4, 6, torch.float32)
    posterior = fit_head([(h, logits)], weight, bias, structure=structure)
    first, again, other = (posterior.sample(5, seed) for seed in (0, 0, 1))
    assert first[0].dtype == torch.float32
    assert first[0].shape == (5, 4, 6)
    assert first[1] is not None
    assert first[1].shape == (5, 4)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("bias", [True, False])
def test_kron_is_full_when_all_probabilities_are_equal(bias: bool) -> None:
    h, logits, weight, b = random_head(100, 4, 6)
    h = h - h.mean(
        0
    )  # otherwise the weight and the bias are not independent, as kron expects to be
    same = logits[:1].expand_as(logits)
    full, kron = (fit_head([(h, same)], weight, b if bias else None, structure=s) for s in BOTH)
    torch.testing.assert_close(
        kron.functional_variance(h), full.functional_variance(h), rtol=1e-9, atol=1e-12
    )


class Largest(TorchDispatchMode):
    """How many elements the largest tensor had that any operation allocated (views are not
    counted).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, t.numel())
        return out


def test_a_large_head_needs_little_memory() -> None:
    h, logits, weight, bias = random_head(1024, 100, 512, torch.float32)
    stream = ((h, logits) for _ in range(3))
    with Largest() as largest:
        posterior = fit_head(stream, weight, bias)
        weights, _ = posterior.sample(8, seed=0)
        variance = posterior.functional_variance(h[:16])
    assert isinstance(posterior.covariance, Kronecker)
    assert weights.shape == (8, 100, 512)
    assert variance.shape == (16, 100, 100)
    assert (variance.diagonal(dim1=1, dim2=2) > 0).all()
    assert (
        largest.elements <= 1024 * 513
    )  # a chunk of features; the whole matrix would have 51,300²


@pytest.mark.parametrize("structure", BOTH)
def test_memory_does_not_grow_with_a_batch(structure: Structure) -> None:
    h, logits, weight, bias = random_head(40_000, 3, 2)
    with Largest() as largest:
        fit_head([(h, logits)], weight, bias, structure=structure)
    assert largest.elements <= 1024 * 9


@pytest.mark.parametrize("width", [408, 409])
def test_auto_is_full_up_to_4096_parameters(width: int) -> None:
    h, logits, weight, bias = random_head(4, 10, width)
    kind = type(fit_head([(h, logits)], weight, bias).covariance)
    assert kind is (Full if width == 408 else Kronecker)


@pytest.mark.parametrize("structure", BOTH)
def test_certain_predictions_leave_curvature(structure: Structure) -> None:
    """At p = 1 - 1e-20, 1 - p is 0 in float64; the curvature is not."""
    h = torch.full((1, 1), 1e10, dtype=torch.float64)
    logits = torch.tensor([[0.0, -46.0]], dtype=torch.float64)
    variance = fit_head(
        [(h, logits)], torch.ones(2, 1).double(), None, 1e-6, structure
    ).functional_variance(h / 1e10)
    curvature = 1e20 * torch.tensor(-46.0).double().exp()
    want = torch.linalg.inv(
        curvature * torch.tensor([[1.0, -1], [-1, 1]]).double() + 1e-6 * torch.eye(2).double()
    )
    torch.testing.assert_close(variance[0], want, rtol=1e-6, atol=0)


def test_the_posterior_keeps_the_head_it_was_fitted_to() -> None:
    h, logits, weight, bias = random_head(20, 3, 4)
    posterior: HeadPosterior = fit_head([(h, logits)], weight.requires_grad_(), bias)
    before = posterior.sample(2, seed=0)[0]
    with torch.no_grad():
        weight.zero_()
    assert not before.requires_grad
    assert torch.equal(posterior.sample(2, seed=0)[0], before)


@pytest.mark.parametrize("structure", BOTH)
def test_errors_say_what_to_do(structure: Structure) -> None:
    h, logits, weight, bias = random_head(20, 3, 4)
    with pytest.raises(QualmsError, match="batches is empty"):
        fit_head([], weight, bias, structure=structure)
    with pytest.raises(QualmsError, match="batches is empty"):
        fit_head([(h[:0], logits[:0])], weight, bias, structure=structure)
    with pytest.raises(
        QualmsError, match=r"\(20, 3\) and logits .* \(20, 4\); this head needs \(n, 4\)"
    ):
        fit_head([(logits, h)], weight, bias, structure=structure)
    with pytest.raises(QualmsError, match="NaN"):
        fit_head([(h * torch.nan, logits)], weight, bias, structure=structure)
    with pytest.raises(QualmsError, match="positive"):
        fit_head([(h, logits)], weight, bias, 0.0, structure)


def test_a_prior_lost_beside_the_curvature_is_named() -> None:
    h, logits, weight, bias = random_head(20, 3, 40)
    with pytest.raises(QualmsError, match="use a larger one"):
        fit_head([(h * 1e6, logits)], weight, bias, 1e-12, "full")
