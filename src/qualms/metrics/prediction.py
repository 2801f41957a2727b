"""The quality of predictions: accuracy and negative log-likelihood."""

from typing import Any

import numpy as np
from jaxtyping import Float

from qualms.metrics.checks import Floats, logits_and_labels


def accuracy(logits: Any, labels: Any) -> float:
    """Compute the share of inputs whose largest logit is that of their label.

    Args:
        logits: One row per input and one column per class, of shape [n, c].
        labels: The class of each input, of shape [n].

    Example:
        ```python
        from qualms.metrics import accuracy

        logits, labels = [[2.0, 0.0], [0.0, 1.0]], [0, 0]
        assert accuracy(logits, labels) == 0.5
        ```
    """
    z, y = logits_and_labels(logits, labels)
    return float((z.argmax(1) == y).mean())


def nll(logits: Any, labels: Any) -> float:
    """Compute the negative log-likelihood -mean log p_y, with p = softmax(logits) and y the label.

    Args:
        logits: One row per input and one column per class, of shape [n, c].
        labels: The class of each input, of shape [n].

    Example:
        ```python
        from qualms.metrics import nll

        logits, labels = [[2.0, 0.0], [0.0, 1.0]], [0, 1]
        print(nll(logits, labels))
        ```
    """
    z, y = logits_and_labels(logits, labels)
    log_p = _log_softmax(z)
    log_p_of_labels = log_p[np.arange(len(y)), y]
    return float(-log_p_of_labels.mean())


def nll_softmax_twice(logits: Any, labels: Any) -> float:
    """Compute -mean log softmax(softmax(z))_y, with z the logits and y the label.

    This is the loss of a network that ends in a softmax, if the loss applies another one. With 10
    classes it is at least -log(e/(e + 9)) = 1.461, and log 10 = 2.303 for a uniform prediction. The
    active-learning NLLs of Wang & Ji (CVPR 2024) lie between the two, so this is the measure to
    compare with theirs: an inference from the range of their numbers, which the paper does not
    confirm. `nll` is the ordinary negative log-likelihood.

    Args:
        logits: One row per input and one column per class, of shape [n, c].
        labels: The class of each input, of shape [n].

    Example:
        ```python
        from qualms.metrics import nll, nll_softmax_twice

        logits, labels = [[20.0, 0.0], [0.0, 20.0]], [0, 1]
        # Certain and right: nll is 0, and nll_softmax_twice is no less than 0.313.
        print(nll(logits, labels), nll_softmax_twice(logits, labels))
        ```
    """
    z, y = logits_and_labels(logits, labels)
    probs = np.exp(_log_softmax(z))
    # `nll` takes these for logits, so it applies the second softmax.
    return nll(probs, y)


def _log_softmax(z: Float[Floats, "n c"]) -> Float[Floats, "n c"]:
    """Compute log p = log softmax(z) of n logit vectors, exactly also for certain predictions.

    log p_c = z_c - max z - log(1 + Σ_k exp(z_k - max z)), with the sum over all classes k except
    for the likeliest, argmax z.
    """
    likeliest = z.argmax(1)[:, None]
    shifted = z - np.take_along_axis(z, likeliest, 1)
    # The probability of each class divided by that of the likeliest one, which is left out.
    odds = np.exp(shifted)
    np.put_along_axis(odds, likeliest, 0.0, 1)
    # 1 + odds would round the small odds of a certain prediction away; log1p does not.
    return shifted - np.log1p(odds.sum(1, keepdims=True))
