"""QUAM: Σ_n w_n KL( p ‖ q_n ) over models q_n that were sought out to disagree about the input.

For each input x and each class k, a copy of the last linear layer takes steps of Adam down

    -log q(k | x) + c L(q),    L the mean cross-entropy on a batch of training data,

with a penalty c that grows, and a rate that falls, by the same factor. All models on the way count,
the given one first, each with its share of the posterior: w_n ∝ exp(-(L(q_n) - L(p)) / T). An input
scores high if models can disagree about it at no cost for the training data. This is the paper's
setting (b), the uncertainty of one given model.
"""

from dataclasses import dataclass, replace
from itertools import cycle

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.memory import default_budget, in_mebibytes
from qualms.gradients.precision import at_least_float32
from qualms.methods.context import BatchContext
from qualms.methods.divergence import kl, log_softmax
from qualms.methods.head import Head
from qualms.methods.method import FEW, TRAINING_DATA, Method
from qualms.methods.training_features import training_features
from qualms.parameters import NOT_NEGATIVE, POSITIVE, check_parameters, whole
from qualms.random import generator

BATCH = 512  # training inputs for each step, as in the paper's code
AT_ONCE = 2**21  # logits of training inputs
# of a head, as measured: itself, Adam's two means, the gradient, its parts, what they are made with
COPIES = 9
COPIES_OF_LOGITS = 5  # of training inputs


@dataclass(frozen=True)
class QUAM(Method):
    """Every `every` steps the penalty is multiplied by `growth`. Settings are those of the paper's
    code for MNIST.

    That code searches for 194 steps and counts the first ten, so ten are taken here. Only the last
    layer is adapted, as in the paper for ImageNet. Each step has another 512 training inputs, in
    random order; the loss of a model is compared with that of the given one on the same inputs.
    Labels are those of `train=` if it has pairs of inputs and labels, else the model's predictions.
    In each step C heads for each input read the 512 training features, which is slow for many
    classes.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import QUAM

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, QUAM(steps=10), train=[(torch.randn(50, 4), torch.arange(50) %
        3)])) ```
    """

    steps: int = 10
    penalty: float = 6.0
    growth: float = 1.9
    every: int = 14
    rate: float = 0.005
    weight_decay: float = 0.001
    temperature: float = 0.001

    name = "quam"
    paper = (
        "Schweighofer et al., Quantification of Uncertainty with Adversarial Models, NeurIPS 2023"
    )
    needs = (TRAINING_DATA,)
    cost = "1 + C heads on 512 training inputs in each step, and 1 for each training input"

    def __post_init__(self) -> None:
        positive = dict.fromkeys(("penalty", "growth", "rate", "temperature"), POSITIVE)
        check_parameters(
            self, self.name, steps=whole(2), every=whole(1), weight_decay=NOT_NEGATIVE, **positive
        )

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        fitted = context.model_context.fitted
        if self not in fitted:
            fitted[self] = _batches(context, self.name, self.steps)
        start, x = _parameters(context.head), _read(context.head.features, context.head)
        classes = len(start)
        pairs = torch.cartesian_prod(torch.arange(len(x)), torch.arange(classes)).to(x.device)
        size = _heads_at_once(context, start, len(fitted[self][0].features))
        found = [
            self._searched(x[part[:, 0]], part[:, 1], start, fitted[self])
            for part in pairs.split(size)
        ]
        divergence, excess = (
            torch.cat(column).unflatten(0, (len(x), classes)) for column in zip(*found, strict=True)
        )
        weights = (-excess / self.temperature).flatten(1).softmax(-1)
        return (weights * divergence.flatten(1)).sum(-1)

    def quick(self) -> "QUAM":
        """The same with two steps."""
        return replace(self, steps=min(self.steps, FEW))

    def _searched(
        self,
        x: Float[Tensor, "m g"],
        wanted: Int[Tensor, " m"],
        start: Float[Tensor, "c g"],
        training: "list[Known]",
    ) -> tuple[Float64[Tensor, "m n"], Float64[Tensor, "m n"]]:
        """KL(p ‖ q) and L(q) - L(p) for the heads on the way from `start` to saying `wanted` of x,
        one for each x.
        """
        heads = start.expand(len(x), *start.shape).clone()
        adam = torch.optim.Adam([heads], self.rate, weight_decay=self.weight_decay)
        log_p = log_softmax((x @ start.mT).double())
        divergence, excess = [], []
        for step, known in zip(range(self.steps), cycle(training), strict=False):
            factor = self.growth ** (step // self.every)
            log_q = log_softmax((heads @ x[:, :, None])[:, :, 0].double())
            loss, slope = known.loss_and_gradient(heads)
            divergence.append(kl(log_p, log_q))
            excess.append(loss.double() - known.loss)
            of_x = (log_q.exp() - F.one_hot(wanted, len(start))).to(x)[:, :, None] * x[:, None]
            heads.grad = of_x + self.penalty * factor * slope
            if (
                float(heads.grad.abs().max()) > torch.finfo(x.dtype).max ** 0.5
            ):  # Adam takes its square
                raise QualmsError(
                    f"quam meets features so large that its steps do not fit {x.dtype}; scale the inputs, or pass the "
                    "model and all data in float64.".replace("torch.", "")
                )
            adam.param_groups[0]["lr"] = self.rate / factor
            adam.step()
        return torch.stack(divergence, dim=1), torch.stack(excess, dim=1)


@dataclass(frozen=True)
class Known:
    """A batch of training inputs, and the loss of the given head on it."""

    features: Float[Tensor, "n g"]
    labels: Int[Tensor, " n"]
    loss: float = 0.0

    def loss_and_gradient(
        self, heads: Float[Tensor, "m c g"]
    ) -> tuple[Float[Tensor, " m"], Float[Tensor, "m c g"]]:
        """The mean cross-entropy of each head, and its gradient."""
        m, c, _ = heads.shape
        log_q = (heads.flatten(0, 1) @ self.features.mT).unflatten(0, (m, c)).log_softmax(1)
        labels = self.labels.expand(m, 1, -1)
        loss = -log_q.gather(1, labels)[:, 0].mean(-1)
        off = log_q.exp().scatter_add(1, labels, log_q.new_full((1, 1, 1), -1.0).expand_as(labels))
        return loss, (off.flatten(0, 1) @ self.features).unflatten(0, (m, c)) / len(self.labels)


def _heads_at_once(context: BatchContext, head: Float[Tensor, "c g"], inputs: int) -> int:
    """How many heads and their logits of training inputs fit the budget."""
    budget = context.model_context.settings.budget or default_budget(head.device)
    logits = len(head) * inputs
    needed = (COPIES * head.numel() + COPIES_OF_LOGITS * logits) * head.element_size()
    if needed > budget:
        raise QualmsError(
            f"one head that quam adapts takes about {in_mebibytes(needed)}, more than the budget of "
            f"{in_mebibytes(budget)}; pass a larger `budget`."
        )
    return max(1, min(AT_ONCE // logits, budget // needed))


def _batches(context: BatchContext, method: str, most: int) -> list[Known]:
    """Training data in batches of one size, at random if there is more than one: it may come class
    by class.
    """
    training, head = training_features(context, method), context.head
    features, labels, count = training.features, training.labels, len(training.labels)
    if count > BATCH:
        used = min(count // BATCH, most) * BATCH
        order = torch.randperm(count, generator=generator(context.seed))[:used].to(labels.device)
        features, labels = features[order], labels[order]
    plain = [
        Known(_read(f, head), y)
        for f, y in zip(features.split(BATCH), labels.split(BATCH), strict=True)
    ]
    given = _parameters(head)[None]
    return [replace(known, loss=float(known.loss_and_gradient(given)[0])) for known in plain]


def _read(features: Float[Tensor, "n f"], head: Head) -> Float[Tensor, "n g"]:
    """The features, with a 1 for the bias if there is one."""
    return (
        at_least_float32(features)
        if head.bias is None
        else F.pad(at_least_float32(features), (0, 1), value=1.0)
    )


def _parameters(head: Head) -> Float[Tensor, "c g"]:
    """The weight, with the bias as its last column if there is one."""
    columns = [head.weight] if head.bias is None else [head.weight, head.bias[:, None]]
    return at_least_float32(torch.cat(columns, dim=1))
