"""Other ways to the same numbers as `class_gradient_norms`, or to comparable ones, for benchmarks
to compare with.

    python benchmarks/peers.py            (prints how far each is from the reference engine, or why
    it cannot run)

Each is called as its own documentation says, on a model that is left unchanged. What a peer cannot
do on a network is in `CANNOT`, so that a table can say why a cell is empty; the command above fails
where it finds otherwise.
"""

import argparse
import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qualms
from qualms.models.cnn import mnist_cnn
from qualms.models.resnet import resnet18
from qualms.models.vit import vit_small

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "MNIST CNN": (mnist_cnn, (1, 28, 28)),
    "ResNet-18": (resnet18, (3, 32, 32)),
    "ViT": (vit_small, (3, 32, 32)),
}
SAME = 1e-4  # the largest relative difference between two ways to the same number in float32


def vmap_jacrev(model: nn.Module, x: Tensor) -> Tensor:
    """torch.func: [n, classes] norms of ∇θ log p_c; the gradients of all classes of all inputs are
    held at once.
    """
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def log_p(theta: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(model, (theta, buffers), one[None])[0].log_softmax(0)

    jacobians = torch.func.vmap(torch.func.jacrev(log_p), (None, 0))(parameters, x)
    return sum(j.flatten(2).square().sum(-1) for j in jacobians.values()).sqrt()


def loop_in_batches(
    model: nn.Module, x: Tensor, draws: int, sigma: float = 0.02, lam: float = 0.3
) -> Tensor:
    """REGrad* as anybody would write it: an input and its perturbed copies as one batch, one
    backward for each class.

    The gradient of a mean is the mean of the gradients, so no copy needs a backward pass of its
    own.
    """
    named = dict(model.named_parameters())
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in named))
    factors = {
        layer: math.exp(lam * (place + 1 - len(layers))) for place, layer in enumerate(layers)
    }
    scores = []
    for one in x:
        noise = sigma * torch.randn(draws, *one.shape)
        log_p = model(torch.cat([one[None], one + noise])).log_softmax(1)
        total = torch.zeros(())
        for c, mean in enumerate(log_p.mean(0)):
            squares = dict.fromkeys(layers, torch.zeros(()))
            for name, g in zip(
                named,
                torch.autograd.grad(mean, list(named.values()), retain_graph=True),
                strict=True,
            ):
                squares[name.rpartition(".")[0]] = (
                    squares[name.rpartition(".")[0]] + g.square().sum()
                )
            norm = sum(factors[layer] * square.sqrt() for layer, square in squares.items())
            total = total + (log_p[0, c].detach() / 2).exp() * norm
        scores.append(total)
    return torch.stack(scores)


def backpack_l2(model: nn.Module, x: Tensor) -> Tensor:
    """BackPACK's BatchL2Grad: [n, classes] norms of ∇θ log p_c, one forward pass and a backward
    pass for each class.

    The loss is a sum over inputs, as a mean would divide each norm by their number. Parameters for
    which BackPACK has no rule (LayerNorm's, and those that are used outside of a module) get no
    norm and count as zero: it warns, but it warns as well about a module whose children it covers
    in full, so its warnings are not informative and are silenced.
    """
    from backpack import backpack, extend
    from backpack.extensions import BatchL2Grad

    norms = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        twin = extend(
            copy.deepcopy(model).eval()
        )  # it leaves hooks in the modules and results in the parameters
        log_p = twin(x).log_softmax(1)
        for of_class in log_p.sum(0):
            with backpack(BatchL2Grad(), retain_graph=True):
                of_class.backward(retain_graph=True)
            norms.append(sum(p.batch_l2 for p in twin.parameters() if hasattr(p, "batch_l2")))
    return torch.stack(norms, dim=1).sqrt()


def pytorch_ood_gradnorm(model: nn.Module, x: Tensor) -> Tensor:
    """pytorch-ood's GradNorm: [n], minus the L1 norm of the gradient of the cross-entropy to the
    uniform distribution.

    One gradient for each input, over all parameters, by vmap(grad) in parts of 32.
    """
    from pytorch_ood.detector import GradNorm

    return GradNorm(model)(x)


_POSTERIORS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def fit_laplace(model: nn.Module, x: Tensor) -> Any:
    """laplace-torch's posterior of the last layer in Kronecker form.

    Fitted on the model's own predictions: the Gauss-Newton matrix of a classifier does not depend
    on labels.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what it imports is still scripted
        from laplace import Laplace
    with torch.no_grad():
        labels = model(x).argmax(1)
    posterior: Any = Laplace(
        copy.deepcopy(model),
        "classification",
        subset_of_weights="last_layer",
        hessian_structure="kron",
    )
    posterior.fit(DataLoader(TensorDataset(x, labels), batch_size=len(x)))
    return posterior


def laplace_last_layer(model: nn.Module, x: Tensor) -> Tensor:
    """laplace-torch's last-layer Laplace: [n, classes] probabilities, from the linearized model and
    the probit formula.

    The first call for a model also fits the posterior, on the inputs of that call; later calls only
    predict. A prediction holds the Jacobian of the last layer, classes² times features for each
    input.
    """
    if model not in _POSTERIORS:
        _POSTERIORS[model] = fit_laplace(model, x)
    return _POSTERIORS[model](x, pred_type="glm", link_approx="probit")


@dataclass(frozen=True)
class Peer:
    """A way to compute something, and what that is."""

    run: Callable[[nn.Module, Tensor], Tensor]
    computes: str
    same: bool  # as `class_gradient_norms`, summed over layers


PEERS = {
    "vmap(jacrev)": Peer(vmap_jacrev, "norms of the gradients of log p_c for every class", True),
    "BackPACK": Peer(backpack_l2, "norms of the gradients of log p_c for every class", True),
    "pytorch-ood GradNorm": Peer(
        pytorch_ood_gradnorm, "L1 norm of one gradient, to the uniform distribution", False
    ),
    "laplace-torch": Peer(
        laplace_last_layer, "probabilities under a posterior of the last layer", False
    ),
}

_NO_TORCHVISION = (
    "Not installed, as it does not import: pytorch-ood 0.4.0 imports torchvision, which breaks beside CPU torch "
    "(ModuleNotFoundError: No module named 'torchvision')."
)
# (peer, network) -> why there is no right result.
CANNOT: dict[tuple[str, str], str] = {
    ("BackPACK", "ViT"): (
        "Runs, but leaves out LayerNorm, the class token and the positions, for which it has no rule: "
        "norms up to 4.6 % too small."
    ),
    **{("pytorch-ood GradNorm", network): _NO_TORCHVISION for network in NETWORKS},
}


def check(peer: Peer, model: nn.Module, x: Tensor, want: Tensor) -> tuple[bool, str]:
    """Whether a peer returns what it documents for this model, and what it was found to return."""
    before = {n: v.clone() for n, v in model.state_dict().items()}
    try:
        have = peer.run(model, x).detach()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}".splitlines()[0]
    touched = any(not torch.equal(v, before[n]) for n, v in model.state_dict().items())
    if touched or any(p.grad is not None for p in model.parameters()):
        return False, "it changes the model"
    if not peer.same:
        return len(have) == len(x) and bool(have.isfinite().all()), f"finite, {tuple(have.shape)}"
    off = float(((have - want) / want).abs().max())
    return off < SAME, f"off by {off:.1e}, and {float((have / want).mean()) - 1:+.1e} in the mean"


def main() -> None:
    """Run every peer on every network, and compare with the reference engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=4)
    count = parser.parse_args().inputs
    surprises = []
    print("| network | peer | found | right |\n|---|---|---|---|")
    for network, (build, shape) in NETWORKS.items():
        torch.manual_seed(0)
        model, x = build().eval(), torch.randn(count, *shape)
        want = (
            qualms.class_gradient_norms(model, x, engine="reference").norms.square().sum(-1).sqrt()
        )
        for name, peer in PEERS.items():
            right, found = check(peer, model, x, want)
            print(f"| {network} | {name} | {found} | {'yes' if right else 'no'} |", flush=True)
            if right == ((name, network) in CANNOT):
                surprises.append(f"{name} on {network}: {found}")
    if surprises:
        raise SystemExit("CANNOT is out of date: " + "; ".join(surprises))


if __name__ == "__main__":
    main()
