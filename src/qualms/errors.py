"""The error that qualms raises for anything a user can fix, and the warnings it issues."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
    """Samples run one at a time: the scores are exact, but slow. The warning names the reason.

    Example:
        ```python
        import warnings
        import qualms

        warnings.simplefilter("ignore", qualms.SlowWarning)  # to silence it
        ```
    """


class ProbabilitiesWarning(UserWarning):
    """The model's outputs look like probabilities but are scored as logits, so scores are wrong.

    Remove the model's final softmax. If you cannot, return log-probabilities: softmax(log p)
    is p again, and log p has the same gradients. Only scores that read the logits themselves
    (`energy`, `max-logit`, `confounding-label`) differ.

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
        qualms.score(model[:-1], torch.rand(2, 4), "entropy")  # logits, as expected
        ```
    """


class UnitsWarning(UserWarning):
    """A noise level is meant for pixels in [0, 1], but the images look normalized.

    Pass `pixel_std=`, the standard deviation that the pixels were divided by, so that
    `+smooth(0.02)` is 2 % of a pixel's range, as in the paper. `pixel_std=1` keeps the noise in the
    units of the inputs.

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
    """Return the first line of an error's message, to quote in the middle of a sentence.

    The final period is dropped. An error without a message is quoted by the name of its class.
    """
    message = str(error).strip() or type(error).__name__
    return message.split("\n")[0].rstrip(".")


@contextmanager
def explain_failure(
    explain: Callable[[Exception], QualmsError],
    *,
    let_through: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Convert any exception that a library raises inside the block to a `QualmsError`.

    Parsers of damaged files, model hubs and imported user code raise exceptions of any class. This
    is the only place that catches them all; the original exception is kept as the cause.

    Args:
        explain: called with the exception that was raised; returns the error to raise instead.
        let_through: classes of exceptions that are not converted. A `QualmsError` never is.

    Raises:
        QualmsError: if any other exception is raised inside the block.

    Example:
        ```python
        import json
        from qualms.errors import QualmsError, explain_failure, reason

        def explain(error):
            return QualmsError(f"settings.json is damaged ({reason(error)}); write it again.")

        try:
            with explain_failure(explain):
                json.loads("{")
        except QualmsError as error:
            print(error)
        ```
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (QualmsError, *let_through)):
            raise
        raise explain(error) from error
