"""What is annotated with a shape has it, in every test: the hook of `conftest.py` is at work."""

import pytest
import torch
from jaxtyping import TypeCheckError

from qualms.gradients.api import ClassGradientNorms
from qualms.methods.features import clafr


def test_a_function_takes_only_the_shapes_that_it_annotates() -> None:
    clafr(torch.ones(2, 3), torch.eye(3).double())
    with pytest.raises(TypeCheckError, match="basis"):
        clafr(torch.ones(2, 3), torch.eye(4).double())


def test_the_shapes_of_a_record_fit_each_other() -> None:
    ClassGradientNorms(torch.ones(2, 3, 1), torch.ones(2, 3), ["a"], [])
    with pytest.raises(TypeCheckError, match="probs"):
        ClassGradientNorms(torch.ones(2, 3, 1), torch.ones(2, 5), ["a"], [])
