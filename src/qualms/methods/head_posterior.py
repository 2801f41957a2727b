"""Last-layer Laplace: a Gaussian posterior over the classifier's head, in closed form.

Around trained weights θ = [W | b] the posterior is N(θ, (H + δI)⁻¹), with δ the precision of the
Gaussian prior and H = Σ_n Λ_n ⊗ h_n h_nᵀ, Λ_n = diag(p_n) - p_n p_nᵀ, the generalized Gauss-Newton
matrix of the cross-entropy summed over the training inputs; h are the features that the head reads,
with a 1 appended for the bias (Kristiadi et al., ICML 2020; Daxberger et al., "Laplace Redux",
NeurIPS 2021).

The conventions are laplace-torch's defaults: H is a sum and not a mean, temperature 1, no damping.
Parameters are laid out as [c, f + 1], the bias in the last column. All sums and factorizations are
in float64.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import slices

Structure = Literal["auto", "full", "kron"]
# Yields pairs of features [n, k] and probabilities [n, c].
FeaturesAndProbs = Iterator[tuple[Tensor, Tensor]]
# The largest number of parameters whose full matrix is built by default: it takes 128 MiB.
FULL_AT_MOST = 4096
DOUBLE_BYTES = 8  # of one number in float64
COPIES_OF_FULL = 2  # the full matrix itself and its Cholesky factor
# Matrices of the size of a Kronecker factor: the sum over all batches, that of one batch, the
# eigenvectors, and what finding them takes.
COPIES_OF_FACTOR = 5
NORMAL_GROUP = 16  # torch draws so many normal numbers together
CHUNK = 1024  # training inputs of a batch that are processed at a time


@dataclass(frozen=True)
class Full:
    """The full covariance (L Lᵀ)⁻¹ of a head's parameters, given by the Cholesky factor L.

    L Lᵀ = H + δI is the precision of the posterior, with H the Gauss-Newton matrix and δ the
    precision of the prior.

    Attributes:
        factor: L. Its axes run over the p = c·k parameters of the head, class by class: k
            parameters for each of c classes.
    """

    factor: Float64[Tensor, "p p"]

    def shape_noise(self, z: Float64[Tensor, "n c k"]) -> Float64[Tensor, "n c k"]:
        """Turn standard normal numbers z into noise of this covariance, (L Lᵀ)⁻¹, as L⁻ᵀz.

        Args:
            z: n draws, in the shape of the head's parameters.
        """
        columns = z.flatten(1).mT  # [c·k, n]
        noise = torch.linalg.solve_triangular(self.factor.mT, columns, upper=True)
        return noise.mT.reshape(z.shape)

    def logit_covariance(self, h: Float64[Tensor, "b k"]) -> Float64[Tensor, "b c c"]:
        """Compute the covariance of the logits of each input: hᵀ Σ_cd h for the classes c and d.

        Σ_cd is the block of the covariance between the parameters of these two classes.

        Args:
            h: the features of each input, with a 1 for the bias if there is one.
        """
        width = h.shape[1]
        # The rows of the covariance that belong to each class: [c, k, c·k].
        class_rows = torch.cholesky_inverse(self.factor).unflatten(0, (-1, width))
        covariances: list[Tensor] = []
        for rows in class_rows:
            products = (h @ rows).unflatten(1, (-1, width))  # [b, c, k]
            covariances.append((products * h[:, None]).sum(2))
        return torch.stack(covariances, dim=1)


@dataclass(frozen=True)
class Kronecker:
    """The covariance (B ⊗ A + δI)⁻¹ of a head's parameters, with B and A in their eigenbases.

    B = U diag(β) Uᵀ is the curvature in the c classes, A = V diag(α) Vᵀ that in the k features (see
    `fit_head`).

    Attributes:
        class_values: β, the eigenvalues of B.
        class_vectors: U, the eigenvectors of B as columns.
        feature_values: α, the eigenvalues of A.
        feature_vectors: V, the eigenvectors of A as columns.
        prior_precision: δ, the precision of the prior.
    """

    class_values: Float64[Tensor, " c"]
    class_vectors: Float64[Tensor, "c c"]
    feature_values: Float64[Tensor, " k"]
    feature_vectors: Float64[Tensor, "k k"]
    prior_precision: float

    def variances(self) -> Float64[Tensor, "c k"]:
        """Compute the variances along the eigenvectors: 1 / (β_i α_j + δ).

        β_i are the eigenvalues of the c classes, α_j those of the k features, and δ is the
        precision of the prior.
        """
        return 1 / (self.class_values[:, None] * self.feature_values + self.prior_precision)

    def shape_noise(self, z: Float64[Tensor, "n c k"]) -> Float64[Tensor, "n c k"]:
        """Turn standard normal numbers z into noise of this covariance, as U (z √variance) Vᵀ.

        U are the eigenvectors of the classes, V those of the features.

        Args:
            z: n draws, in the shape of the head's parameters.
        """
        return self.class_vectors @ (z * self.variances().sqrt()) @ self.feature_vectors.mT

    def logit_covariance(self, h: Float64[Tensor, "b k"]) -> Float64[Tensor, "b c c"]:
        """Compute the covariance of the logits of each input: U diag(v) Uᵀ.

        v_i = Σ_j variance_ij (Vᵀh)_j² is the variance along the i-th eigenvector of the classes.
        U are these eigenvectors, V those of the features.

        Args:
            h: the features of each input, with a 1 for the bias if there is one.
        """
        class_variances = (h @ self.feature_vectors).square() @ self.variances().mT  # v: [b, c]
        return (self.class_vectors * class_variances[:, None]) @ self.class_vectors.mT


@dataclass(frozen=True)
class HeadPosterior:
    """A Gaussian over the parameters of a linear head.

    Attributes:
        weight: the mean of the weight, which is the trained weight.
        bias: the mean of the bias, which is the trained bias; None if the head has none.
        covariance: the covariance of all parameters [c, k]: the weight, with the bias, if there is
            one, as the last column (k = f + 1, else f).
    """

    weight: Float[Tensor, "c f"]
    bias: Float[Tensor, " c"] | None
    covariance: Full | Kronecker

    def sample(
        self,
        n: int,
        seed: int,
    ) -> tuple[Float[Tensor, "n c f"], Float[Tensor, "n c"] | None]:
        """Draw n heads in the weight's dtype, but at least float32.

        The same n and seed give the same heads.

        Returns:
            The weights and the biases; None for the biases if the head has none.
        """
        # All n heads in a single part.
        ((weights, biases),) = self.samples(n, seed, at_once=n)
        return weights, biases

    def samples(
        self,
        n: int,
        seed: int,
        at_once: int,
    ) -> Iterator[tuple[Float[Tensor, "d c f"], Float[Tensor, "d c"] | None]]:
        """Draw the same heads as `sample`, but only `at_once` of them at a time.

        Args:
            n: the number of heads in all.
            seed: the seed; the same n and seed give the same heads.
            at_once: the number of heads in a part.

        Yields:
            The weights and biases of the next heads; None for the biases if the head has none.
        """
        mean = _join_weight_and_bias(self.weight, self.bias)
        num_features = self.weight.shape[1]
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        for normal_numbers in _draw_normal_numbers(n, mean.numel(), seed, at_once):
            z = normal_numbers.view(-1, *mean.shape).to(mean.device)
            heads = (mean + self.covariance.shape_noise(z)).to(dtype)
            weights = heads[..., :num_features]
            # The bias is the last column.
            yield weights, None if self.bias is None else heads[..., num_features]

    def functional_variance(self, features: Float[Tensor, "b f"]) -> Float64[Tensor, "b c c"]:
        """Compute J Σ Jᵀ, the covariance of the logits of each input under this Gaussian.

        Σ is the covariance of the head's parameters, and J the derivative of the logits with
        respect to them. This is exact, since logits are linear in these parameters.

        Args:
            features: the features that the head reads.
        """
        h = _append_one(features.to(self.weight.device), self.bias is not None)
        return self.covariance.logit_covariance(h)


def _draw_normal_numbers(
    n: int,
    width: int,
    seed: int,
    at_once: int,
) -> Iterator[Float64[Tensor, "d width"]]:
    """Draw the rows of torch.randn(n, width) in parts, with the same numbers as in a single call.

    torch draws normal numbers 16 at a time, and the last ones of a call in another way. So calls
    whose lengths are multiples of 16 draw what one long call would draw. Numbers that a call draws
    beyond the rows of its part are kept for the next part.

    Args:
        n: the number of rows in all.
        width: the length of a row.
        seed: the seed of the numbers.
        at_once: the number of rows in a part.

    Yields:
        The next rows.
    """
    generator = torch.Generator().manual_seed(seed)
    total = n * width
    num_drawn = 0
    unused = torch.empty(0, dtype=torch.float64)
    for part in slices(n, at_once):
        # Draw up to the next multiple of 16; and all the rest if fewer than 16 would be left.
        num_groups = -(-part.stop * width // NORMAL_GROUP)  # rounded up
        end = num_groups * NORMAL_GROUP
        if total - end < NORMAL_GROUP:
            end = total
        fresh = torch.randn(end - num_drawn, generator=generator, dtype=torch.float64)
        num_drawn = end
        # Without leftovers, no copy is needed.
        available = torch.cat([unused, fresh]) if len(unused) else fresh
        num_needed = (part.stop - part.start) * width
        # A copy, so that the numbers of this part can be freed.
        unused = available[num_needed:].clone()
        yield available[:num_needed].view(-1, width)


def fit_head(
    batches: Iterable[tuple[Tensor, Tensor]],
    weight: Float[Tensor, "c f"],
    bias: Float[Tensor, " c"] | None,
    prior_precision: float = 1.0,
    structure: Structure = "auto",
) -> HeadPosterior:
    """Fit a Gaussian posterior to a linear head, in one pass over its training inputs.

    The memory that this takes does not grow with the number of training inputs.

    The covariance of the posterior is (H + δI)⁻¹, with H = Σ_n Λ_n ⊗ h_n h_nᵀ and
    Λ_n = diag(p_n) - p_n p_nᵀ: h_n are the features of training input n, with a 1 appended for the
    bias, and p_n its probabilities. `full` keeps H as it is. `kron` replaces it by B ⊗ A with
    B = Σ_n Λ_n and A = (1/N) Σ_n h_n h_nᵀ, where weight and bias are taken as independent (A has no
    entries between the features and the 1), and adds δ to the eigenvalues of the product. It is
    exact for the weight when all p_n are equal. Both are defined as laplace-torch's structures of
    these names.

    Args:
        batches: pairs of features [n, f] and logits [n, c] of the training inputs, read once.
        weight: the trained weight of the head.
        bias: the trained bias of the head, or None.
        prior_precision: δ, the inverse variance of the prior (the weight decay of a loss summed
            over the inputs).
        structure: `full`, `kron` or `auto`. `auto` is full up to 4096 parameters, whose matrix is
            128 MiB and takes seconds to factorize, and kron beyond: a head of 100 classes on 512
            features has 51,300 parameters, and its matrix would be 20 GiB.

    Returns:
        The posterior, with copies of weight and bias as its mean.
    """
    if not (math.isfinite(prior_precision) and prior_precision > 0):
        raise QualmsError(
            f"prior_precision={prior_precision} is invalid; it must be a positive number."
        )
    if structure not in ("auto", "full", "kron"):
        raise QualmsError(f"structure={structure!r} is invalid; choose 'auto', 'full' or 'kron'.")
    weight = weight.detach().clone()
    bias = None if bias is None else bias.detach().clone()
    num_classes, width = _join_weight_and_bias(weight, bias).shape
    features_and_probs = _read_batches(batches, weight, has_bias=bias is not None)
    covariance: Full | Kronecker
    if structure == "full" or (structure == "auto" and num_classes * width <= FULL_AT_MOST):
        zeros = weight.new_zeros(num_classes, width, dtype=torch.float64)
        hessian = _sum_gauss_newton(features_and_probs, zeros)
        covariance = _invert_full(hessian, prior_precision)
    else:
        class_factor, feature_factor = _sum_kronecker_factors(features_and_probs, bias is not None)
        class_values, class_vectors = _eigendecompose(class_factor)
        feature_values, feature_vectors = _eigendecompose(feature_factor)
        covariance = Kronecker(
            class_values=class_values,
            class_vectors=class_vectors,
            feature_values=feature_values,
            feature_vectors=feature_vectors,
            prior_precision=float(prior_precision),
        )
    return HeadPosterior(weight, bias, covariance)


def bytes_of_fit(classes: int, width: int) -> int:
    """Compute the memory in bytes that `fit_head` takes with the default structure.

    Args:
        classes: the number of classes of the head.
        width: the number of features, including the 1 for the bias if there is one.
    """
    if classes * width <= FULL_AT_MOST:
        return COPIES_OF_FULL * DOUBLE_BYTES * (classes * width) ** 2
    # The two Kronecker factors are [classes, classes] and [width, width]. While the larger one is
    # decomposed, two matrices of the smaller one exist at most: its sum and its eigenvectors.
    larger, smaller = max(classes, width), min(classes, width)
    return COPIES_OF_FACTOR * DOUBLE_BYTES * larger**2 + 2 * DOUBLE_BYTES * smaller**2


def _read_batches(
    batches: Iterable[tuple[Tensor, Tensor]],
    weight: Float[Tensor, "c f"],
    has_bias: bool,
) -> FeaturesAndProbs:
    """Check batches of features and logits, and yield them with probabilities, a chunk at a time.

    Args:
        batches: pairs of features [n, f] and logits [n, c].
        weight: the weight of the head, for the shapes and the device.
        has_bias: whether a 1 is appended to the features.

    Yields:
        Features [n, k] in float64, with their 1 (k = f + 1, else f), and probabilities [n, c].
    """
    is_empty = True
    classes, width = weight.shape
    for features, logits in batches:
        features_fit = features.shape == (len(logits), width)
        if not features_fit or logits.shape != (len(features), classes):
            raise QualmsError(
                f"a batch has features of shape {tuple(features.shape)} and logits of shape "
                f"{tuple(logits.shape)}; this head needs (n, {width}) and (n, {classes})."
            )
        chunks = zip(
            features.detach().split(CHUNK),
            logits.detach().split(CHUNK),
            strict=True,
        )
        for h, z in chunks:
            if not bool(torch.isfinite(h).all() and torch.isfinite(z).all()):
                raise QualmsError(
                    "the features or logits of a batch contain NaN or infinity; "
                    "clean the training inputs."
                )
            is_empty = is_empty and len(h) == 0
            probs = z.to(weight.device, torch.float64).softmax(1)
            yield _append_one(h.to(weight.device), has_bias), probs
    if is_empty:
        raise QualmsError(
            "batches is empty, but a posterior needs at least one training input; pass an iterable "
            "that has not been consumed."
        )


def _sum_gauss_newton(
    features_and_probs: FeaturesAndProbs,
    zeros: Float64[Tensor, "c k"],
) -> Float64[Tensor, "c*k c*k"]:
    """Sum the Gauss-Newton matrix H = Σ_n Λ_n ⊗ h_n h_nᵀ, with Λ_n = diag(p_n) - p_n p_nᵀ.

    The block of H between two classes c ≠ d is -Σ_n p_c p_d h hᵀ. The rows of Λ_n sum to zero, so a
    block on the diagonal is minus the sum of the other blocks in its row. This avoids p (1 - p),
    which loses digits as p → 1.

    Args:
        features_and_probs: chunks of features h, with the bias's 1, and probabilities p.
        zeros: zeros in the shape of the head's parameters, on its device.
    """
    num_classes, width = zeros.shape
    hessian = zeros.new_zeros(num_classes, width, num_classes, width)
    # The blocks above the diagonal.
    for h, p in features_and_probs:
        for c in range(num_classes - 1):
            products = p[:, c, None] * p[:, c + 1 :]
            weighted = products[:, :, None] * h[:, None]  # [n, later classes, k]
            hessian[c, :, c + 1 :] -= (h.mT @ weighted.flatten(1)).unflatten(1, (-1, width))
    # Mirror them below the diagonal, then fill the diagonal.
    for c in range(num_classes):
        hessian[c + 1 :, :, c] = hessian[c, :, c + 1 :].permute(1, 2, 0)
    for c in range(num_classes):
        # Still zero, so it adds nothing to the sum over its row.
        hessian[c, :, c] = -hessian[c].sum(1)
    return hessian.flatten(2).flatten(0, 1)


def _invert_full(
    hessian: Float64[Tensor, "p p"],
    prior_precision: float,
) -> Full:
    """Represent the covariance (H + δI)⁻¹ by the Cholesky factor of H + δI; overwrites H.

    Args:
        hessian: H, the Gauss-Newton matrix.
        prior_precision: δ.

    Raises:
        QualmsError: if δ is lost to rounding when it is added to H.
    """
    # H is zero along equal shifts of all logits. There δ alone makes the sum invertible, so it must
    # not be lost to rounding.
    rounding = float(hessian.diagonal().abs().max()) * torch.finfo(hessian.dtype).eps
    is_lost = not prior_precision > rounding
    hessian.diagonal().add_(prior_precision)
    # `info` is not 0 if the matrix is not positive definite.
    factor, info = torch.linalg.cholesky_ex(hessian)
    if is_lost or bool(info):
        raise QualmsError(
            f"prior_precision={prior_precision} is too small: it is lost to rounding next to the "
            "curvature of these features; use a larger one."
        )
    return Full(factor)


def _sum_kronecker_factors(
    features_and_probs: FeaturesAndProbs,
    has_bias: bool,
) -> tuple[Float64[Tensor, "c c"], Float64[Tensor, "k k"]]:
    """Sum the Kronecker factors B = Σ_n diag(p_n) - p_n p_nᵀ and A = (1/N) Σ_n h_n h_nᵀ.

    The rows of B sum to zero, so the diagonal follows from the other entries. This avoids
    p (1 - p), which loses digits as p → 1. Entries of A between the features and the bias's 1 are
    set to zero.

    Args:
        features_and_probs: chunks of features h and probabilities p, at least one.
        has_bias: whether the last feature is the 1 of the bias.

    Returns:
        B and A.
    """
    h, p = next(features_and_probs)
    num_inputs = len(h)
    prob_products = p.mT @ p
    feature_products = h.mT @ h
    for h, p in features_and_probs:
        num_inputs += len(h)
        prob_products += p.mT @ p
        feature_products += h.mT @ h
    prob_products.fill_diagonal_(0)
    if has_bias:
        feature_products[-1, :-1] = 0
        feature_products[:-1, -1] = 0
    return prob_products.sum(1).diag() - prob_products, feature_products / num_inputs


def _eigendecompose(
    matrix: Float64[Tensor, "n n"],
) -> tuple[Float64[Tensor, " n"], Float64[Tensor, "n n"]]:
    """Compute the eigenvalues and eigenvectors of a symmetric positive semidefinite matrix.

    Eigenvalues that are no larger than rounding errors are set to zero.
    """
    values, vectors = torch.linalg.eigh(matrix)
    largest = values[-1]  # eigenvalues ascend
    rounding = len(values) * torch.finfo(values.dtype).eps * largest
    return torch.where(values > rounding, values, 0.0), vectors


def _append_one(
    features: Float[Tensor, "n f"],
    has_bias: bool,
) -> Float64[Tensor, "n k"]:
    """Convert features to float64, and append a column of ones if the head has a bias.

    k = f + 1 with a bias, else f.
    """
    return torch.nn.functional.pad(features.double(), (0, int(has_bias)), value=1.0)


def _join_weight_and_bias(
    weight: Float[Tensor, "c f"],
    bias: Float[Tensor, " c"] | None,
) -> Float64[Tensor, "c k"]:
    """Append the bias, if there is one, to the weight as its last column, in float64."""
    return weight.double() if bias is None else torch.cat([weight, bias[:, None]], dim=1).double()
