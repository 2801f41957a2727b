"""The one exception that qualms raises for anything a user can put right, and the one warning it gives."""


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
    """Inputs run one at a time: the numbers are right, but they come slowly. The warning names the reason.

    Example:
        ```python
        import warnings
        import qualms

        warnings.simplefilter("ignore", qualms.SlowWarning)  # to silence it
        ```
    """


def reason(error: Exception) -> str:
    """What another library's error says, short enough for the middle of a sentence."""
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
