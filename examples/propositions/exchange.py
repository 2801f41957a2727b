"""Proposition 2: a small change of the weights can be had by a small change of the input instead,
and the reverse.

At the first layer, W (x + Δx) = (W + ΔW) x is solved for ΔW, or for Δx. By the outputs alone, it is
f(x + Δx, θ) = f(x, θ + Δθ) for Δθ on all layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

import qualms
from qualms.methods.divergence import expected_kl
from qualms.methods.perturb_inputs import PerturbX
from qualms.methods.perturb_model import PerturbTheta
from qualms.random import generator

Draw = Callable[..., Tensor]


def normal(seed: int, *purpose: int) -> Draw:
    """Draws of standard normal numbers in float64."""
    source = generator(seed, *purpose)
    return lambda *shape: torch.randn(*shape, generator=source, dtype=torch.double)


def network(inputs: int, width: int, classes: int, seed: int = 0) -> nn.Sequential:
    """Linear, tanh, linear, with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, classes)
        ).double()


def weights_for_input(
    inputs: int, width: int, size: float, zeros: float = 0.0, seed: int = 0
) -> dict[str, float]:
    """Δx given: ΔW = W Δx xᵀ / ‖x‖² has the same effect, exactly and for Δx of any size, wherever x
    is not 0.

    `elementwise` is the residual of the paper's condition ΔW_jk x_k = W_jk Δx_k, which has no
    solution at the components where x_k = 0 and Δx_k is not; `relative` is ‖ΔW‖ / ‖W‖, over ‖Δx‖ /
    ‖x‖.
    """
    draw = normal(seed, inputs, width)
    weight, x, shift = draw(width, inputs), draw(inputs), size * draw(inputs)
    x[: round(zeros * inputs)] = 0
    change = torch.outer(weight @ shift, x) / x.square().sum()
    by_element = torch.where(x == 0, 0.0, weight * shift / x)
    wanted = weight @ shift
    return {
        "residual": float((change @ x - wanted).norm() / wanted.norm()),
        "elementwise": float((by_element @ x - wanted).norm() / wanted.norm()),
        "relative": float(change.norm() / weight.norm() / (shift.norm() / x.norm())),
    }


def input_for_weights(inputs: int, width: int, draws: int = 200, seed: int = 0) -> float:
    """ΔW given: the share of ‖ΔW x‖ that no Δx reproduces, ‖(I - W W⁺) ΔW x‖ / ‖ΔW x‖, root mean
    square over draws.

    W Δx stays in the range of W: 0 for full row rank, which needs width ≤ inputs; else about sqrt(1
    - inputs/width).
    """
    draw = normal(seed, inputs, width)
    weight, x = draw(width, inputs), draw(inputs)
    wanted = draw(draws, width, inputs) @ x
    missed = wanted - wanted @ torch.linalg.pinv(weight).T @ weight.T
    return float((missed.square().sum(1) / wanted.square().sum(1)).mean().sqrt())


def convolution(
    channels: int = 8, side: int = 8, kernel: int = 3, seed: int = 0
) -> dict[str, float]:
    """Both directions where the first layer is a convolution, whose few weights serve every
    position.

    Least-squares residuals of Δkernel * x = kernel * Δx for random Δx (`weights_for_input`) and for
    random Δkernel (`input_for_weights`), relative to the wanted change.
    """
    draw = normal(seed, channels, side, kernel)
    weight, x = draw(channels, 1, kernel, kernel), draw(1, 1, side, side)
    of_input = _matrix(lambda d: conv2d(d.reshape(1, 1, side, side), weight), side * side)
    of_weight = _matrix(lambda d: conv2d(x, d.reshape(weight.shape)), weight.numel())

    def residual(means: Tensor, wanted: Tensor) -> float:
        solution = torch.linalg.lstsq(means, wanted, driver="gelsd").solution
        return float((means @ solution - wanted).norm() / wanted.norm())

    return {
        "weights_for_input": residual(of_weight, of_input @ draw(side * side, 20)),
        "input_for_weights": residual(of_input, of_weight @ draw(weight.numel(), 20)),
    }


def _matrix(linear: Callable[[Tensor], Tensor], size: int) -> Tensor:
    return torch.stack([linear(e).flatten() for e in torch.eye(size, dtype=torch.double)], 1)


def same_output(
    model: nn.Module, x: Tensor, size: float = 1e-3, steps: int = 20, seed: int = 0
) -> dict[str, float]:
    """Δθ on every layer given: Gauss-Newton steps for the smallest Δx with the same
    log-probabilities.

    `rank` is that of ∂ log p / ∂x; a Δx exists for every small Δθ where it is C - 1. `residual` is
    relative to the change wanted, `ratio` is ‖Δx‖ / ‖Δθ‖.
    """
    draw = normal(seed, 1)
    change = {name: size * draw(*p.shape) for name, p in model.named_parameters()}
    moved = {name: p.detach() + change[name] for name, p in model.named_parameters()}
    wanted = torch.func.functional_call(model, moved, (x[None],))[0].log_softmax(0).detach()

    def output(shift: Tensor) -> Tensor:
        return model((x + shift)[None])[0].log_softmax(0)

    start = output(torch.zeros_like(x)).detach()
    shift = torch.zeros_like(x)
    for _ in range(steps):
        slope = torch.func.jacrev(output)(shift).detach()
        shift = shift + torch.linalg.pinv(slope, rtol=1e-9) @ (wanted - output(shift).detach())
    slope = torch.func.jacrev(output)(torch.zeros_like(x)).detach()
    return {
        "rank": float(torch.linalg.matrix_rank(slope, rtol=1e-9)),
        "residual": float((output(shift).detach() - wanted).norm() / (wanted - start).norm()),
        "ratio": float(shift.norm() / torch.cat([c.flatten() for c in change.values()]).norm()),
    }


def first_layer_rank(model: nn.Module, x: Tensor, first: str) -> int:
    """The least rank over inputs of ∂ log p / ∂(first layer): with C - 1, its weights can move p in
    every direction.
    """
    found = qualms.class_gradient_gram(model, x, params=first)
    probs = found.logits.softmax(-1)
    apart = (
        torch.eye(probs.shape[-1], dtype=probs.dtype) - probs[:, None]
    )  # log p moves by (e_c - p)ᵀ J Δθ
    gram = apart @ found.gram.sum(1) @ apart.mT
    return int(torch.linalg.matrix_rank(gram, rtol=1e-10, hermitian=True).min())


class FirstLayerOnly(nn.Module):
    """A network whose only weights are the first layer's; the rest is out of the reach of
    perturbations.
    """

    def __init__(self, weight: Tensor, rest: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self._rest = nn.Parameter(weight), [rest]  # in a list: not a submodule

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self._rest[0](x @ self.weight.T)


def expectations(
    decades: float, inputs: int = 20, width: int = 10, sigma: float = 0.02, draws: int = 400
) -> dict[str, float]:
    """Does E_Δθ KL equal E_Δx KL? ΔW ~ N(0, σ²I) against the matched Δx = W⁺ ΔW x, and against Δx ~
    N(0, s²I).

    `matched` is the largest relative difference over inputs, draw by draw. For isotropic Δx, s is
    chosen so that the medians agree: `spread` is then the ratio of the largest to the smallest of
    perturb-x / perturb-theta over inputs, `rank` Spearman's correlation of the two. The inputs'
    norms span `decades` powers of ten.
    """
    draw, count = normal(0, 2), 60
    norms = inputs**0.5 * torch.logspace(-decades / 2, decades / 2, count, dtype=torch.double)
    weight, head, x = draw(width, inputs) / inputs**0.5, draw(5, width), draw(count, inputs)
    x = x / x.norm(dim=1, keepdim=True) * norms[:, None]
    weight = (
        weight * torch.logspace(0, -1, width, dtype=torch.double)[:, None]
    )  # features of unequal strength
    model = FirstLayerOnly(weight, lambda h: h.tanh() @ head.T)

    changes = sigma * draw(draws, width, inputs)
    with torch.no_grad():
        log_p = model(x).log_softmax(-1)
        by_weight = torch.stack(
            [(x @ (weight + c).T).tanh() @ head.T for c in changes], 1
        ).log_softmax(-1)
        shifts = torch.einsum("iw,nwj,bj->bni", torch.linalg.pinv(weight), changes, x)
        by_input = model(x[:, None] + shifts).log_softmax(-1)
    kl_weight, kl_input = expected_kl(by_weight, log_p), expected_kl(by_input, log_p)

    theta = qualms.score(model, x, PerturbTheta(sigma, draws))
    probe = qualms.score(model, x, PerturbX(sigma, draws))
    scale = float((theta / probe).median().sqrt())
    ratio = qualms.score(model, x, PerturbX(sigma * scale, draws)) / theta
    ranks = torch.stack([theta.argsort().argsort(), probe.argsort().argsort()]).double()
    return {
        "matched": float(((kl_input - kl_weight) / kl_weight).abs().max()),
        "spread": float(ratio.max() / ratio.min()),
        "rank": float(torch.corrcoef(ranks)[0, 1]),
    }
