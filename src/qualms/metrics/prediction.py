"""How good the predictions are themselves."""

from typing import Any

import numpy as np
from jaxtyping import Float

from qualms.metrics.checks import Floats, logits_and_labels


def accuracy(logits: Any, labels: Any) -> float:
    """The share of inputs whose largest logit is that of their label.

    Args:
        logits: one row for each input and one column for each class [n, classes].
        labels: the class of each input [n].

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
    """The negative log-likelihood -mean log p_y, p = softmax(z), in double precision.

    Args:
        logits: one row for each input and one column for each class [n, classes].
        labels: the class of each input [n].

    Example:
        ```python
        from qualms.metrics import nll

        logits, labels = [[2.0, 0.0], [0.0, 1.0]], [0, 1]
        print(nll(logits, labels))
        ```
    """
    z, y = logits_and_labels(logits, labels)
    return float(-_log_softmax(z)[np.arange(len(y)), y].mean())


def nll_softmax_twice(logits: Any, labels: Any) -> float:
    """-mean log softmax(softmax(z))_y: what a network that ends in a softmax gets from a loss that
    applies another.

    With 10 classes the least possible is -log(e/(e + 9)) = 1.461, and a uniform prediction gives
    log 10 = 2.303. The active-learning NLLs of Wang & Ji (CVPR 2024) lie between the two, so this
    is what can be put beside them. That is an inference from the range of their numbers, not
    something that the paper says. `nll` is the likelihood proper.

    Args:
        logits: one row for each input and one column for each class [n, classes].
        labels: the class of each input [n].

    Example:
        ```python
        from qualms.metrics import nll, nll_softmax_twice

        logits, labels = [[20.0, 0.0], [0.0, 20.0]], [0, 1]
        # Certain and right: 0 for the one, and no less than 0.313 for the other.
        print(nll(logits, labels), nll_softmax_twice(logits, labels))
        ```
    """
    z, y = logits_and_labels(logits, labels)
    return nll(np.exp(_log_softmax(z)), y)


def _log_softmax(z: Float[Floats, "n c"]) -> Float[Floats, "n c"]:
    """log p_c = z_c - max z - log(1 + Σ exp(z_k - max z)) over all k but the likeliest."""
    likeliest = z.argmax(1)[:, None]
    z = z - np.take_along_axis(z, likeliest, 1)
    odds = np.exp(z)
    np.put_along_axis(odds, likeliest, 0.0, 1)
    # log1p, as 1 + odds would lose those of a certain prediction.
    return z - np.log1p(odds.sum(1, keepdims=True))
