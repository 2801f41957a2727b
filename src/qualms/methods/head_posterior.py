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

Structure = Literal["auto", "full", "kron"]
# Pairs of features and probabilities.
FeaturesAndProbs = Iterator[tuple[Tensor, Tensor]]
# The number of parameters whose matrix takes 128 MiB.
FULL_AT_MOST = 4096
DOUBLE = 8  # bytes
COPIES_OF_FULL = 2  # the matrix itself and its factor
# Matrices of the size of a Kronecker factor: the sum over all batches, that of one batch, the
# eigenvectors, and what finding them takes.
COPIES_OF_FACTOR = 5
LANES = 16  # normal numbers that torch draws together
CHUNK = 1024  # rows of a batch that are summed at a time


@dataclass(frozen=True)
class Full:
    """The whole covariance (H + δI)⁻¹, by the Cholesky factor of its inverse: H + δI = L Lᵀ.

    Attributes:
        factor: L. Its axes run over the p = c·k parameters of the head, class by class.
    """

    factor: Float64[Tensor, "p p"]

    def shape_noise(self, z: Float64[Tensor, "n c k"]) -> Float64[Tensor, "n c k"]:
        """Turn standard normal z into noise of this covariance: L⁻ᵀz has the covariance (L Lᵀ)⁻¹."""
        return torch.linalg.solve_triangular(
            self.factor.mT, z.flatten(1).mT, upper=True
        ).mT.reshape(z.shape)

    def of_logits(self, h: Float64[Tensor, "b k"]) -> Float64[Tensor, "b c c"]:
        """Compute the covariance of the logits of each input: hᵀ Σ_cd h for the classes c and d.

        Σ_cd is the block of the covariance between the parameters of these classes.

        Args:
            h: the features of each input, with a 1 for the bias if there is one.
        """
        width = h.shape[1]
        blocks = torch.cholesky_inverse(self.factor).unflatten(0, (-1, width))  # [c, k, c·k]
        return torch.stack(
            [((h @ rows).unflatten(1, (-1, width)) * h[:, None]).sum(2) for rows in blocks],
            dim=1,
        )


@dataclass(frozen=True)
class Kronecker:
    """The covariance (B ⊗ A + δI)⁻¹, by the eigendecompositions B = U diag(β) Uᵀ and A = V diag(α)
    Vᵀ.

    B is the curvature in the c classes, A that in the k features (see `fit_head`).

    Attributes:
        class_values: β.
        class_vectors: U.
        feature_values: α.
        feature_vectors: V.
        prior_precision: δ.
    """

    class_values: Float64[Tensor, " c"]
    class_vectors: Float64[Tensor, "c c"]
    feature_values: Float64[Tensor, " k"]
    feature_vectors: Float64[Tensor, "k k"]
    prior_precision: float

    def variances(self) -> Float64[Tensor, "c k"]:
        """Compute 1 / (β_i α_j + δ): the covariance, diagonal in the basis of the eigenvectors."""
        return 1 / (self.class_values[:, None] * self.feature_values + self.prior_precision)

    def shape_noise(self, z: Float64[Tensor, "n c k"]) -> Float64[Tensor, "n c k"]:
        """Turn standard normal z into noise of this covariance: U (z √variance) Vᵀ."""
        return self.class_vectors @ (z * self.variances().sqrt()) @ self.feature_vectors.mT

    def of_logits(self, h: Float64[Tensor, "b k"]) -> Float64[Tensor, "b c c"]:
        """Compute the covariance of the logits of each input: U diag(Σ_j variance_ij (Vᵀh)_j²) Uᵀ.

        Args:
            h: the features of each input, with a 1 for the bias if there is one.
        """
        along = (h @ self.feature_vectors).square() @ self.variances().mT  # [b, c]
        return (self.class_vectors * along[:, None]) @ self.class_vectors.mT


@dataclass(frozen=True)
class HeadPosterior:
    """A Gaussian over a linear head: its mean, the trained weight and bias, and its covariance."""

    weight: Float[Tensor, "c f"]
    bias: Float[Tensor, " c"] | None
    covariance: Full | Kronecker

    def sample(
        self,
        n: int,
        seed: int,
    ) -> tuple[Float[Tensor, "n c f"], Float[Tensor, "n c"] | None]:
        """Draw n heads; n and the seed decide them. They have the weight's dtype, but at least
        float32.

        Returns:
            The weights and the biases; None for the biases if the head has none.
        """
        ((weights, biases),) = self.samples(n, seed, n)
        return weights, biases

    def samples(
        self,
        n: int,
        seed: int,
        at_once: int,
    ) -> Iterator[tuple[Float[Tensor, "d c f"], Float[Tensor, "d c"] | None]]:
        """Draw the same heads as `sample`, in parts.

        Args:
            n: the number of heads in all.
            seed: decides the heads, together with n.
            at_once: the number of heads in a part.

        Yields:
            The weights and biases of the next heads.
        """
        mean = _extend_weight(self.weight, self.bias)
        features = self.weight.shape[1]
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        for z in _normal_numbers(n, mean.numel(), seed, at_once):
            noise = z.view(-1, *mean.shape).to(mean.device)
            heads = (mean + self.covariance.shape_noise(noise)).to(dtype)
            yield (
                heads[..., :features],
                None if self.bias is None else heads[..., features],
            )

    def functional_variance(self, features: Float[Tensor, "b f"]) -> Float64[Tensor, "b c c"]:
        """Compute J Σ Jᵀ, the covariance of the logits of each input.

        It is exact, since logits are linear in the parameters of the head.

        Args:
            features: the features that the head reads.
        """
        h = _append_one(features.to(self.weight.device), self.bias is not None)
        return self.covariance.of_logits(h)


def _normal_numbers(
    n: int,
    width: int,
    seed: int,
    at_once: int,
) -> Iterator[Float64[Tensor, "d width"]]:
    """Draw the rows of torch.randn(n, width), `at_once` rows at a time, with the same numbers.

    torch draws normal numbers 16 at a time, and the last ones of a call in another way. So calls
    whose lengths are multiples of 16 draw what one long call would draw. Numbers that a call draws
    beyond the rows of its part are kept for the next part.

    Args:
        n: the number of rows in all.
        width: the length of a row.
        seed: the seed of the numbers.
        at_once: the number of rows in a part.
    """
    generator = torch.Generator().manual_seed(seed)
    unused = torch.empty(0, dtype=torch.float64)
    drawn = 0
    for start in range(0, n, at_once):
        stop = min(start + at_once, n)
        # Draw up to a multiple of 16; and all the rest if fewer than 16 numbers would be left.
        end = min(-(-stop * width // LANES) * LANES, n * width)
        if n * width - end < LANES:
            end = n * width
        fresh = torch.randn(end - drawn, generator=generator, dtype=torch.float64)
        drawn = end
        numbers = torch.cat([unused, fresh]) if len(unused) else fresh
        needed = (stop - start) * width
        unused = numbers[needed:].clone()
        yield numbers[:needed].view(-1, width)


def fit_head(
    batches: Iterable[tuple[Tensor, Tensor]],
    weight: Float[Tensor, "c f"],
    bias: Float[Tensor, " c"] | None,
    prior_precision: float = 1.0,
    structure: Structure = "auto",
) -> HeadPosterior:
    """Fit the posterior of a head to its training inputs, in one pass and in memory that does not
    grow with them.

    `full` keeps H whole. `kron` replaces it by B ⊗ A with B = Σ_n Λ_n and A = (1/N) Σ_n h_n h_nᵀ,
    where weight and bias are taken as independent (A has no entries between the features and the
    1), and adds δ to the eigenvalues of the product. It is exact for the weight when all p_n are
    equal. Both are defined as laplace-torch's structures of these names.

    Args:
        batches: pairs of features [n, f] and logits [n, c] of the training inputs, read once.
        weight: the trained weight of the head.
        bias: the trained bias of the head, or None.
        prior_precision: δ, the inverse variance of the prior (the weight decay of a loss summed
            over the inputs).
        structure: `auto` is full up to 4096 parameters, whose matrix is 128 MiB and takes seconds
            to factorize, and kron beyond: a head of 100 classes on 512 features has 51,300, and its
            matrix would be 20 GiB.

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
    classes, width = _extend_weight(weight, bias).shape
    rows = _read_batches(batches, weight, bias is not None)
    covariance: Full | Kronecker
    if structure == "full" or (structure == "auto" and classes * width <= FULL_AT_MOST):
        zeros = weight.new_zeros(classes, width, dtype=torch.float64)
        covariance = _invert_full(_gauss_newton(rows, zeros), prior_precision)
    else:
        of_classes, of_features = _kronecker_factors(rows, bias is not None)
        covariance = Kronecker(
            *_eigen(of_classes),
            *_eigen(of_features),
            float(prior_precision),
        )
    return HeadPosterior(weight, bias, covariance)


def bytes_of_fit(classes: int, width: int) -> int:
    """Compute the memory in bytes that `fit_head` takes by default.

    Args:
        classes: the number of classes of the head.
        width: the number of features, the 1 for the bias included.
    """
    if classes * width <= FULL_AT_MOST:
        return COPIES_OF_FULL * DOUBLE * (classes * width) ** 2
    larger, smaller = max(classes, width), min(classes, width)
    return COPIES_OF_FACTOR * DOUBLE * larger**2 + 2 * DOUBLE * smaller**2


def _read_batches(
    batches: Iterable[tuple[Tensor, Tensor]],
    weight: Float[Tensor, "c f"],
    has_bias: bool,
) -> FeaturesAndProbs:
    """Check batches of features and logits, and yield them a chunk at a time.

    Args:
        batches: pairs of features [n, f] and logits [n, c].
        weight: the weight of the head, for the shapes and the device.
        has_bias: whether a 1 is appended to the features.

    Yields:
        Features [n, k] with their 1, and probabilities [n, c].
    """
    is_empty = True
    classes, width = weight.shape
    for features, logits in batches:
        fits_head = features.shape == (len(logits), width)
        if not fits_head or logits.shape != (len(features), classes):
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


def _gauss_newton(
    rows: FeaturesAndProbs,
    zeros: Float64[Tensor, "c k"],
) -> Float64[Tensor, "c*k c*k"]:
    """Compute Σ_n Λ_n ⊗ h_n h_nᵀ from its blocks between two classes c ≠ d, -Σ_n p_c p_d h hᵀ.

    The rows of Λ sum to zero, so a block on the diagonal is minus the sum of the other blocks in
    its row. This avoids p (1 - p), which loses digits as p → 1.

    Args:
        rows: chunks of features h, with the bias's 1, and probabilities p.
        zeros: zeros in the shape of the head's parameters, on its device.
    """
    classes, width = zeros.shape
    upper = zeros.new_zeros(classes, width, classes, width)
    # The blocks above the diagonal.
    for h, p in rows:
        for c in range(classes - 1):
            products = p[:, c, None] * p[:, c + 1 :]
            weighted = products[:, :, None] * h[:, None]  # [n, later classes, k]
            upper[c, :, c + 1 :] -= (h.mT @ weighted.flatten(1)).unflatten(1, (-1, width))
    # Mirror them below the diagonal, then fill the diagonal.
    for c in range(classes):
        upper[c + 1 :, :, c] = upper[c, :, c + 1 :].permute(1, 2, 0)
        upper[c, :, c] = 0
    for c in range(classes):
        upper[c, :, c] = -upper[c].sum(1)
    return upper.flatten(2).flatten(0, 1)


def _invert_full(hessian: Float64[Tensor, "p p"], prior_precision: float) -> Full:
    """Compute (H + δI)⁻¹ as a Cholesky factor. Overwrites H.

    Raises:
        QualmsError: if δ is lost in rounding beside H.
    """
    # H is zero along equal shifts of all logits. There δ alone makes the sum invertible, so it must
    # not be lost in rounding.
    rounding = float(hessian.diagonal().abs().max()) * torch.finfo(hessian.dtype).eps
    is_lost = not prior_precision > rounding
    hessian.diagonal().add_(prior_precision)
    factor, info = torch.linalg.cholesky_ex(hessian)
    if is_lost or bool(info):
        raise QualmsError(
            f"prior_precision={prior_precision} is too small: it is lost to rounding next to the "
            "curvature of these features; use a larger one."
        )
    return Full(factor)


def _kronecker_factors(
    rows: FeaturesAndProbs,
    has_bias: bool,
) -> tuple[Float64[Tensor, "c c"], Float64[Tensor, "k k"]]:
    """Compute B = Σ_n Λ_n and A = (1/N) Σ_n h_n h_nᵀ, without products of features and the bias's 1.

    The diagonal of B follows from the other entries of its rows, as in `_gauss_newton`.

    Args:
        rows: chunks of features and probabilities.
        has_bias: whether the last feature is the 1 of the bias.

    Returns:
        B and A.
    """
    h, p = next(rows)
    total, products, squares = len(h), p.mT @ p, h.mT @ h
    for h, p in rows:
        total += len(h)
        products += p.mT @ p
        squares += h.mT @ h
    products.fill_diagonal_(0)
    if has_bias:
        squares[-1, :-1] = squares[:-1, -1] = 0
    return products.sum(1).diag() - products, squares / total


def _eigen(matrix: Float64[Tensor, "n n"]) -> tuple[Float64[Tensor, " n"], Float64[Tensor, "n n"]]:
    """Compute the eigenvalues and eigenvectors of a symmetric positive semidefinite matrix.

    Eigenvalues that are no more than rounding are set to zero.
    """
    values, vectors = torch.linalg.eigh(matrix)
    rounding = len(values) * torch.finfo(values.dtype).eps * values[-1]  # the largest is the last
    return torch.where(values > rounding, values, 0.0), vectors


def _append_one(features: Float[Tensor, "n f"], has_bias: bool) -> Float64[Tensor, "n k"]:
    """Convert features to float64, and append a column of ones if the head has a bias (k = f + 1,
    else f).
    """
    return torch.nn.functional.pad(features.double(), (0, int(has_bias)), value=1.0)


def _extend_weight(
    weight: Float[Tensor, "c f"],
    bias: Float[Tensor, " c"] | None,
) -> Float64[Tensor, "c k"]:
    """Join weight and bias to [W | b] in float64."""
    return weight.double() if bias is None else torch.cat([weight, bias[:, None]], dim=1).double()
