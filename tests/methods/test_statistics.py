"""Monte-Carlo scores against closed forms on a linear model, within their error bars."""

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.methods.context import BatchContext, ModelContext
from qualms.methods.registry import parse


def linear() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """Model, inputs, probabilities, and the Fisher matrices diag(p) - ppᵀ of the logits."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 4).double(), torch.randn(3, 6).double()
    p = model(x).softmax(1).detach()
    return model, x, p, torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def test_perturb_x_is_half_the_trace_of_the_fisher_matrix_for_small_noise() -> None:
    """E KL = ½ σ² tr(Wᵀ F W) + O(σ⁴); for a quadratic form of a Gaussian the variance is ½ σ⁴
    tr((Wᵀ F W)²).
    """
    model, x, _, fisher = linear()
    sigma, draws = 1e-2, 4000
    have = qualms.score(model, x, f"perturb-x({sigma},{draws})")
    w = model.weight.detach()
    form = w.T @ fisher @ w
    want = sigma**2 / 2 * form.diagonal(dim1=1, dim2=2).sum(1)
    error = (sigma**4 / 2 * (form @ form).diagonal(dim1=1, dim2=2).sum(1) / draws).sqrt()
    assert ((have - want).abs() < 4 * error + 20 * sigma**4).all()
    assert (4 * error < 0.2 * want).all()  # the error bar is tight enough to mean something


@pytest.mark.slow
def test_perturb_theta_is_half_the_trace_of_the_fisher_matrix_for_small_noise() -> None:
    """Logits move by ΔW x + Δb, of covariance σ²(‖x‖² + 1) I: E KL = ½ σ² (‖x‖² + 1) tr F + O(σ⁴)."""
    model, x, _, fisher = linear()
    sigma, draws = 3e-3, 2000
    have = qualms.score(model, x, f"perturb-theta({sigma},{draws})")
    spread = sigma**2 * (x.square().sum(1) + 1)
    want = spread / 2 * fisher.diagonal(dim1=1, dim2=2).sum(1)
    error = (spread**2 / 2 * (fisher @ fisher).diagonal(dim1=1, dim2=2).sum(1) / draws).sqrt()
    assert ((have - want).abs() < 4 * error + 20 * spread**2).all()
    assert (4 * error < 0.2 * want).all()


# torch's own forward-mode rules are still scripted.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_many_draws_of_smoothing_reach_the_analytic_mean() -> None:
    """E[(e_c - p(x + Δ)) (x + Δ, 1)ᵀ] = (e_c - p - ½σ²∇²p)(x, 1)ᵀ - σ² (∇p, 0) + O(σ⁴)."""
    model, x, p, _ = linear()
    sigma = 0.05
    smoothing = qualms.Smoothing(sigma, 1000)
    runs = [
        qualms.class_gradient_norms(model, x, smoothing=smoothing, seed=s).norms[:, :, 0]
        for s in range(8)
    ]
    have, error = torch.stack(runs).mean(0), torch.stack(runs).std(0) / 8**0.5
    plain = qualms.class_gradient_norms(model, x).norms[:, :, 0]
    want = torch.zeros_like(have)

    def probabilities(at: Tensor) -> Tensor:
        return model(at).softmax(0)

    for b in range(3):
        slope = torch.func.jacrev(probabilities)(x[b]).detach()  # [c, features]
        curvature = torch.func.hessian(probabilities)(x[b]).diagonal(dim1=1, dim2=2).sum(1).detach()
        extended = torch.cat([x[b], torch.ones(1).double()])
        for c in range(4):
            away = torch.eye(4).double()[c] - p[b] - sigma**2 / 2 * curvature
            mean = away[:, None] * extended
            mean[:, :6] -= sigma**2 * slope
            want[b, c] = mean.norm()
    shift = (plain - want).abs().amax(1, keepdim=True)
    assert ((have - want).abs() < 4 * error + 0.02 * shift).all()  # 2 % for the σ⁴ that is left out
    assert (4 * error < shift).all()  # the error bar is tight enough to mean something


def test_mutual_information_of_laplace_matches_more_samples() -> None:
    model, x, _, _ = linear()
    train = [
        torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double() for _ in range(2)
    ]
    few = torch.stack(
        [qualms.score(model, x, "laplace(1,200)", train=train, seed=s) for s in range(8)]
    )
    many = qualms.score(model, x, "laplace(1,20000)", train=train, seed=99)
    assert ((few.mean(0) - many).abs() < 4 * few.std(0) / 8**0.5 + 0.01 * many).all()


def test_passes_are_enough_to_score() -> None:
    model, x, p, _ = linear()
    passes = BatchContext(ModelContext(model), x)
    torch.testing.assert_close(parse("msp").score(passes), 1 - p.max(1).values)
