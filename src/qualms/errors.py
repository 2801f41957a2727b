"""The one exception that qualms raises for anything a user can put right, and the three warnings it
gives.
"""


class QualmsError(ValueError):
    """One sentence: what is wrong, where, and what to do about it.

    Example:
        ```python
        import torch
        import qualms

        try:
            qualms.score(torch.nn.Linear(4, 3), torch.rand(2, 4), "no-such-method")
        except qualms.QualmsError as error:
            print(error)
        ```
    """


class SlowWarning(UserWarning):
    """Inputs run one at a time: the numbers are right, but they come slowly. The warning names the
    reason.

    Example:
        ```python
        import warnings
        import qualms

        warnings.simplefilter("ignore", qualms.SlowWarning)  # to silence it
        ```
    """


class ProbabilitiesWarning(UserWarning):
    """What the model returns looks like probabilities, and is scored as logits: scores and
    probabilities are wrong.

    Leave out the model's last softmax. Where that cannot be done, return the logarithm of the
    probabilities: its softmax is the probabilities again, and the gradients of log p are the same.
    Scores that read the logits themselves (`energy`, `max-logit`, `confounding-label`) differ.

    Example:
        ```python
        import warnings
        import torch
        import qualms

        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            qualms.score(model, torch.rand(2, 4), "entropy")
        assert caught[0].category is qualms.ProbabilitiesWarning
        qualms.score(model[:-1], torch.rand(2, 4), "entropy")  # logits: as it should be
        ```
    """


class UnitsWarning(UserWarning):
    """Noise is given as for pixels from 0 to 1, and the inputs are images in other units, such as
    normalized ones.

    `pixel_std=` says what the pixels were divided by, so that `+smooth(0.02)` is 0.02 of a pixel's
    range, as in the paper; `pixel_std=1` takes the noise as it is.

    Example:
        ```python
        import torch
        import qualms
        from qualms.models.cnn import mnist_cnn

        pixels = torch.rand(1, 1, 28, 28)
        normalized = (pixels - 0.13) / 0.31
        print(qualms.score(mnist_cnn(), normalized, pixel_std=0.31))
        ```
    """


def reason(error: Exception) -> str:
    """What another library's error says, short enough for the middle of a sentence."""
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
