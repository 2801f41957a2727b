"""Errors as users see them."""

from collections.abc import Callable
from typing import Any

import pytest

import qualms


def refusal(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """Return the message of the error that a call must raise, which is one line."""
    with pytest.raises(qualms.QualmsError) as caught:
        function(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message
