"""`compare` runs each expensive pass once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qualms
from tests.helpers.settings import Setting

GRADIENT_SCORES = ["regrad", "exgrad", "ungrad", "gradnorm", "negrad", "confounding-label"]


@pytest.mark.parametrize("spec", ["regrad", "exgrad", "fisher", "isotropic"])
def test_a_sketch_of_many_tangents_is_near_the_score_itself(setting: Setting, spec: str) -> None:
    others = [
        "regrad",
        "fisher",
    ]  # of which one adds up norms, the other squares, from the same tangents
    have = qualms.compare(setting.model, setting.x, [spec, *others], engine=qualms.Sketch(400))[
        spec
    ]
    torch.testing.assert_close(
        have, qualms.score(setting.model, setting.x, spec), rtol=0.15, atol=0
    )


class Counter:
    """Rows that went forward through the model's first and last layer, and backward passes."""

    def __init__(self) -> None:
        self.first = self.last = self.backward = 0


@contextmanager
def counted(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    counter = Counter()
    whole = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        counter.backward += 1
        return whole(outputs, inputs, *args, **kwargs)

    def first(_m: nn.Module, _i: Any, out: Tensor) -> None:
        counter.first += len(out)

    def last(_m: nn.Module, _i: Any, out: Tensor) -> None:
        counter.last += len(out)

    handles = [model[0].register_forward_hook(first), model[-1].register_forward_hook(last)]
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad)
        yield counter
    for handle in handles:
        handle.remove()


def passes(
    setting: Setting, methods: list[str], monkeypatch: pytest.MonkeyPatch, **more: Any
) -> Counter:
    with counted(setting.model, monkeypatch) as counter:
        qualms.compare(setting.model, setting.x, methods, **more)
    return counter


B, C = 4, 5
# Before the engine starts it looks at one row by plain autograd, plainly again and watched, and at
# two rows twice.
LOOK_ROWS, LOOK_BACKWARD = 1 + 1 + 1 + 2 + 2, 1 + 1 + 1
ALONE = 2  # rows of each chunk that run by themselves, too
SEPARATE = 1  # backward pass for each chunk, which shows that the model does not move rows about


def test_all_gradient_scores_come_from_one_pass(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = passes(setting, GRADIENT_SCORES, monkeypatch)
    # The logits, which also tell whether inputs influence each other, the look, and the recorded
    # pass.
    assert counter.first == B + LOOK_ROWS + B + ALONE
    # Classes, and the directions of gradnorm, negrad and the label.
    assert counter.backward == LOOK_BACKWARD + C + 3 + SEPARATE
    layered = [*GRADIENT_SCORES, "regrad+layers", "exgrad+layers(0.4)"]
    again = passes(setting, layered, monkeypatch)
    assert (again.first, again.backward) == (counter.first, counter.backward)


def test_all_smoothed_scores_come_from_one_smoothed_pass(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    smoothed = [f"{name}+layers+smooth(0.1,4)" for name in ("regrad", "exgrad", "ungrad")]
    counter = passes(setting, smoothed, monkeypatch)
    assert counter.first == B + LOOK_ROWS + 5 * B + ALONE
    assert counter.backward == LOOK_BACKWARD + C + SEPARATE
    both = passes(setting, [*smoothed, "regrad", "exgrad"], monkeypatch)
    assert both.first == counter.first + B + ALONE  # one look serves both passes
    assert both.backward == LOOK_BACKWARD + 2 * (C + SEPARATE)


def test_scores_of_the_logits_and_the_head_cost_one_forward_pass(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = [
        "entropy",
        "msp",
        "max-logit",
        "energy",
        "gen",
        "exgrad-v",
        "gradnorm-huang",
        "inserted-dropout",
    ]
    counter = passes(setting, methods, monkeypatch)
    assert (counter.first, counter.backward) == (B, 0)


def test_equal_draws_are_shared(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = passes(setting, ["perturb-x(0.1,10)", "perturb-x(0.1,10) ", "entropy"], monkeypatch)
    assert counter.first == B + 11 * B


def test_what_comes_before_the_first_dropout_runs_once(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    whole = torch.conv2d

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is whole:
                calls.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        qualms.score(setting.model, setting.x, "mc-dropout(20)")
    assert len(calls) == 1 + 1  # the logits, and the part before the dropout layer


def test_replay_gives_way_when_the_rest_writes_into_what_came_before() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h += self.drop(h)
            return self.b(h)

    class Plain(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h + self.drop(h))

    torch.manual_seed(0)
    model, same, x = InPlace(), Plain(), torch.randn(5, 4)
    same.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        qualms.score(model, x, "mc-dropout(10)"), qualms.score(same, x, "mc-dropout(10)")
    )


def test_the_training_data_is_read_once_for_all_batches(setting: Setting) -> None:
    reads = []

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            reads.append(1)
            yield torch.randn(16, 1, 8, 8).double()

    qualms.compare(setting.model, [setting.x, setting.x], ["laplace", "entropy"], train=Loader())
    assert len(reads) == 1
