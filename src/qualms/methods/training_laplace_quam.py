"""Scores over alternative last layers that fit the training data: samples from a posterior
(`Laplace`), and heads that are searched to disagree with the given one (`QUAM`). The rest of the
network runs once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.memory import (
    budget_of_rows,
    default_budget,
    free_bytes,
    in_mebibytes,
    require_room,
)
from qualms.gradients.precision import at_least_float32
from qualms.methods.context import BatchContext
from qualms.methods.divergence import kl, log_softmax
from qualms.methods.head import Head, forward_with_head, require_head
from qualms.methods.head_posterior import (
    HeadPosterior,
    bytes_of_fit,
    fit_head,
)
from qualms.methods.method import FEW, TRAINING_DATA, Method
from qualms.methods.monte_carlo import (
    DOUBLE_BYTES,
    MonteCarlo,
    information_over_draws,
)
from qualms.methods.training_react_vim import training_features
from qualms.parameters import NOT_NEGATIVE, POSITIVE, whole
from qualms.random import generator

# The number of tensors of the size of a head, in double precision, that exist while one head is
# sampled: its noise, the steps that turn it into a head, the mean.
COPIES_OF_SAMPLE = 6
# The number of training inputs in each step of QUAM, as in the paper's code.
BATCH = 512
# The largest number of logits of training inputs that QUAM computes at a time.
LOGITS_AT_ONCE = 2**21
# The number of tensors of the size of a head that exist for each head that QUAM adapts, as
# measured: the head itself, Adam's two means, the gradient, its parts and intermediate results.
COPIES_OF_HEAD = 9
# The number of tensors of the size of the training inputs' logits that exist for each such head.
COPIES_OF_LOGITS = 5


@dataclass(frozen=True)
class Laplace(MonteCarlo):
    """Last-layer Laplace: mutual information over samples from the posterior of the last layer
    (`divergence.mutual_information`), fitted to training data (`head_posterior.fit_head`).

    The posterior is Gaussian with the full Gauss-Newton matrix up to 4096 parameters, and its
    Kronecker form beyond. The prior precision is laplace-torch's default.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Laplace

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Laplace(draws=20), train=[torch.randn(50, 4)]))
        ```
    """

    prior_precision: float = 1.0
    draws: int = 100

    name = "laplace"
    paper = "Daxberger et al., Laplace Redux: Effortless Bayesian Deep Learning, NeurIPS 2021"
    needs = (TRAINING_DATA,)
    cost = "1 + N heads, and 1 for each training input"
    rules: ClassVar = {"prior_precision": POSITIVE, "draws": whole(2)}

    @property
    def extra_passes(self) -> float:
        """0, since only the last layer is sampled."""
        return 0.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute mutual information between the prediction and the head, over sampled heads."""
        model_context = context.model_context
        posterior = model_context.get_or_compute(self, lambda: self._fit_posterior(context))
        head = context.head
        budget = budget_of_rows(model_context.settings.budget, context.device)
        # A quarter of the budget is for the heads that are sampled together.
        heads_at_once = max(1, budget // (4 * _bytes_of_sample(head)))

        def log_probs(block: slice) -> Iterator[Tensor]:
            """Yield log p of a block of inputs for one sampled head after the other, [b, 1, c]."""
            for weights, biases in posterior.samples(self.draws, context.seed, heads_at_once):
                features = head.features[block].to(weights)
                for i, weight in enumerate(weights):
                    logits = F.linear(
                        features,
                        weight,
                        None if biases is None else biases[i],
                    )
                    yield log_softmax(logits.double())[:, None]  # [b, 1, c]: one draw

        return information_over_draws(context, self.draws, log_probs)

    def _fit_posterior(self, context: BatchContext) -> HeadPosterior:
        """Fit the posterior of the head to the training data.

        Raises:
            QualmsError: if this takes more memory than there is.
        """
        head = context.head
        budget = context.model_context.settings.budget
        classes, width = head.weight.shape
        if head.bias is not None:
            width += 1
        needed = bytes_of_fit(classes, width) + _bytes_of_sample(head)
        what = (
            f"the covariance of a head of {classes:,} classes and {width:,} features, and a sample,"
        )
        require_room(
            needed,
            budget or free_bytes(context.device),
            what,
            "or use inserted-dropout",
        )
        batches = self._training_batches(context)
        return fit_head(batches, head.weight, head.bias, self.prior_precision)

    def _training_batches(self, context: BatchContext) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of features that the last layer reads and logits, over all training inputs."""
        for batch in context.model_context.training_batches(self.name):
            for part in context.chunks(batch):
                logits, head = forward_with_head(context.model, part)
                yield require_head(head).features, logits


def _bytes_of_sample(head: Head) -> int:
    """Compute the memory in bytes that sampling one head takes."""
    return COPIES_OF_SAMPLE * DOUBLE_BYTES * head.weight.numel()


def quam(
    divergence: Float[Tensor, "b n"],
    excess_loss: Float[Tensor, "b n"],
    temperature: float = 0.001,
) -> Float[Tensor, " b"]:
    """QUAM: Σ_n w_n KL( p ‖ q_n ), w_n ∝ exp(-(L(q_n) - L(p)) / T).

    Args:
        divergence: KL( p ‖ q_n ) between the prediction p of the given model and those of n others.
        excess_loss: L(q_n) - L(p), how much larger the loss of each of these models is on training
            data than that of the given model.
        temperature: T; a low one leaves only models that fit the training data as well.
    """
    weights = (-excess_loss / temperature).softmax(-1)
    return (weights * divergence).sum(-1)


@dataclass(frozen=True)
class QUAM(Method):
    """QUAM: Σ_n w_n KL( p ‖ q_n ) over models q_n that are searched to disagree about the input.

    For each input x and each class k, a copy of the last linear layer takes steps of Adam down

        -log q(k | x) + c L(q),    L the mean cross-entropy on a batch of training data,

    with a penalty c that grows, and a rate that falls, by the same factor: every `every` steps by
    `growth`. All models on the way count, the given one first, each with its share of the
    posterior: w_n ∝ exp(-(L(q_n) - L(p)) / T). An input scores high if models can disagree about it
    at no cost for the training data. This is the paper's setting (b), the uncertainty of one given
    model.

    Settings are those of the paper's code for MNIST. That code searches for 194 steps and counts
    the first ten, so ten are taken here. Only the last layer is adapted, as in the paper for
    ImageNet. Each step has another 512 training inputs, in random order; the loss of a model is
    compared with that of the given one on the same inputs. Labels are those of `train=` if it has
    pairs of inputs and labels, else the model's predictions. In each step C heads for each input
    read the 512 training features, which is slow for many classes.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import QUAM

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        train = [(torch.randn(50, 4), torch.arange(50) % 3)]
        print(qualms.score(model, x, QUAM(steps=10), train=train))
        ```
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
    rules: ClassVar = {
        "steps": whole(2),  # the first model is the given one
        "penalty": POSITIVE,
        "growth": POSITIVE,
        "every": whole(1),
        "rate": POSITIVE,
        "weight_decay": NOT_NEGATIVE,
        "temperature": POSITIVE,
    }

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `quam` over the models of all searches."""
        model_context = context.model_context
        training = model_context.get_or_compute(self, lambda: self._training_batches(context))
        given_head = _as_matrix(context.head)
        x = _extend_features(context.head.features, context.head)
        num_inputs, num_classes = len(x), len(given_head)
        # One search for each pair of an input and a class that it tries to predict: [pairs, 2].
        indices, classes = torch.arange(num_inputs), torch.arange(num_classes)
        pairs = torch.cartesian_prod(indices, classes).to(x.device)
        divergences: list[Tensor] = []
        excess_losses: list[Tensor] = []
        for part in pairs.split(_heads_at_once(context, given_head, len(training[0].features))):
            part_indices, part_classes = part.T
            divergence, excess = self._search(x[part_indices], part_classes, given_head, training)
            divergences.append(divergence)
            excess_losses.append(excess)
        # From [pairs, steps] to [inputs, classes · steps]: all models found for an input count.
        shape = (num_inputs, num_classes)
        all_divergences = torch.cat(divergences).unflatten(0, shape).flatten(1, 2)
        all_losses = torch.cat(excess_losses).unflatten(0, shape).flatten(1, 2)
        return quam(all_divergences, all_losses, self.temperature)

    def quick(self) -> "QUAM":
        """Return a copy with two steps at most: enough to see whether the method works."""
        return replace(self, steps=min(self.steps, FEW))

    def _search(
        self,
        x: Float[Tensor, "m g"],
        targets: Int[Tensor, " m"],
        given_head: Float[Tensor, "c g"],
        training: "list[TrainingBatch]",
    ) -> tuple[Float64[Tensor, "m n"], Float64[Tensor, "m n"]]:
        """Adapt m copies of the head: copy i is to predict class `targets[i]` for features `x[i]`.

        The copies take n steps of Adam down -log q(target | x) + c L(q), with q the prediction of
        a copy, L its mean cross-entropy on a batch of training data, and a growing penalty c.

        Args:
            x: the features of an input for each copy, with a 1 for the bias if there is one.
            targets: a class for each copy.
            given_head: the model's own head, as `_as_matrix` returns it.
            training: batches of training data; each step takes the next one.

        Returns:
            KL(p ‖ q) and L(q) - L(p) of each copy before each of the n steps, with p the prediction
            of the given head.
        """
        heads = given_head.expand(len(x), *given_head.shape).clone()  # [m, c, g]
        adam = torch.optim.Adam([heads], self.rate, weight_decay=self.weight_decay)
        log_p = log_softmax((x @ given_head.mT).double())
        one_hot = F.one_hot(targets, len(given_head))
        divergences: list[Tensor] = []
        excess_losses: list[Tensor] = []
        for step, batch in zip(range(self.steps), cycle(training), strict=False):
            growth_factor = self.growth ** (step // self.every)
            # Each head reads its own row of x.
            log_q = log_softmax((heads @ x[:, :, None])[:, :, 0].double())
            loss, loss_gradient = batch.loss_and_gradient(heads)
            divergences.append(kl(log_p, log_q))
            excess_losses.append(loss.double() - batch.loss)
            # The gradient of -log q(target | x) with respect to the head: (q - e_target) xᵀ.
            target_gradient = (log_q.exp() - one_hot).to(x)[:, :, None] * x[:, None]
            heads.grad = target_gradient + self.penalty * growth_factor * loss_gradient
            # Adam squares the gradient, which must not overflow.
            if float(heads.grad.abs().max()) > torch.finfo(x.dtype).max ** 0.5:
                dtype = str(x.dtype).removeprefix("torch.")
                raise QualmsError(
                    f"the features are too large for quam's steps in {dtype}; scale the inputs, or "
                    "pass the model and all data in float64."
                )
            adam.param_groups[0]["lr"] = self.rate / growth_factor
            adam.step()
        return torch.stack(divergences, dim=1), torch.stack(excess_losses, dim=1)

    def _training_batches(self, context: BatchContext) -> "list[TrainingBatch]":
        """Split the training features into batches of equal size, with the given head's loss on each.

        There is one batch for each step at most. If there is more than one, the order of the inputs
        is random, as training data may be sorted by class.
        """
        training = training_features(context, self.name)
        head = context.head
        features = training.features
        labels = training.labels
        num_inputs = len(labels)
        if num_inputs > BATCH:
            # Inputs beyond the last full batch are left out.
            num_used = min(num_inputs // BATCH, self.steps) * BATCH
            order = torch.randperm(num_inputs, generator=generator(context.seed))[:num_used]
            order = order.to(labels.device)
            features = features[order]
            labels = labels[order]
        given_head = _as_matrix(head)[None]  # [1, c, g]: a stack of one head
        batches: list[TrainingBatch] = []
        parts = zip(features.split(BATCH), labels.split(BATCH), strict=True)
        for batch_features, batch_labels in parts:
            batch = TrainingBatch(_extend_features(batch_features, head), batch_labels)
            loss_of_given_head, _ = batch.loss_and_gradient(given_head)
            batches.append(replace(batch, loss=float(loss_of_given_head)))
        return batches


@dataclass(frozen=True)
class TrainingBatch:
    """A batch of training data, and the loss of the given head on it.

    Attributes:
        features: the features that the last layer reads, with a 1 for the bias if it has one.
        labels: the class of each input.
        loss: the mean cross-entropy of the given head on this batch; 0 until it is computed.
    """

    features: Float[Tensor, "n g"]
    labels: Int[Tensor, " n"]
    loss: float = 0.0

    def loss_and_gradient(
        self,
        heads: Float[Tensor, "m c g"],
    ) -> tuple[Float[Tensor, " m"], Float[Tensor, "m c g"]]:
        """Compute the mean cross-entropy of m heads on this batch, and its gradients.

        Args:
            heads: m heads, each as `_as_matrix` returns it.

        Returns:
            The loss of each head, and its gradient with respect to that head.
        """
        m, c, _ = heads.shape
        # [m, c, n], by a single matrix product over all rows of all heads.
        log_q = (heads.flatten(0, 1) @ self.features.mT).unflatten(0, (m, c)).log_softmax(1)
        labels = self.labels.expand(m, 1, -1)
        loss = -log_q.gather(1, labels)[:, 0].mean(-1)
        minus_one = log_q.new_full((1, 1, 1), -1.0).expand_as(labels)
        # The gradient with respect to the logits: probabilities minus one-hot labels, [m, c, n].
        logit_gradient = log_q.exp().scatter_add(1, labels, minus_one)
        gradient = (logit_gradient.flatten(0, 1) @ self.features).unflatten(0, (m, c))
        return loss, gradient / len(self.labels)


def _heads_at_once(
    context: BatchContext,
    head: Float[Tensor, "c g"],
    inputs: int,
) -> int:
    """Compute how many heads QUAM can adapt at once within the memory budget.

    Args:
        context: the context that holds the budget.
        head: the model's own head, as `_as_matrix` returns it.
        inputs: the number of training inputs in a batch, whose logits each head computes.

    Raises:
        QualmsError: if a single head does not fit.
    """
    budget = context.model_context.settings.budget or default_budget(head.device)
    num_logits = len(head) * inputs
    num_entries = COPIES_OF_HEAD * head.numel() + COPIES_OF_LOGITS * num_logits
    needed = num_entries * head.element_size()
    if needed > budget:
        raise QualmsError(
            f"adapting one head takes about {in_mebibytes(needed)}, more than quam's budget of "
            f"{in_mebibytes(budget)}; pass a larger `budget`."
        )
    return max(1, min(LOGITS_AT_ONCE // num_logits, budget // needed))


def _extend_features(
    features: Float[Tensor, "n f"],
    head: Head,
) -> Float[Tensor, "n g"]:
    """Append a 1 to each feature vector if the head has a bias (g = f + 1, else f).

    The result is in float32 at least.
    """
    features = at_least_float32(features)
    return features if head.bias is None else F.pad(features, (0, 1), value=1.0)


def _as_matrix(head: Head) -> Float[Tensor, "c g"]:
    """Join the weight and the bias of a head into one matrix, in float32 at least.

    The bias, if there is one, is the last column (g = f + 1, else f).
    """
    columns = [head.weight] if head.bias is None else [head.weight, head.bias[:, None]]
    return at_least_float32(torch.cat(columns, dim=1))
