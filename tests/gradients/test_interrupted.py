"""After Ctrl-C, whenever it comes, model and process are usable."""

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import qualms
from qualms.gradients.isolation import interrupts
from tests import networks as net
from tests.helpers.model_state import fingerprint, same

X = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def fail() -> None:
    raise KeyboardInterrupt


def usable(
    model: nn.Module, before: dict[str, object], want: Tensor, engine: qualms.Sketch | str
) -> None:
    after = fingerprint(model)
    for key in before:
        assert same(before[key], after[key]), key
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert torch.equal(qualms.class_gradient_norms(model, X, engine=engine).norms, want)
    with forward_ad.dual_level():  # which cannot be entered twice
        assert (
            forward_ad.unpack_dual(forward_ad.make_dual(torch.zeros(()), torch.ones(()))).tangent
            == 1
        )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own, of the rules it compiles on first use
@pytest.mark.parametrize(
    "engine", ["exact", "reference", qualms.Sketch(2)], ids=["exact", "reference", "sketch"]
)
@pytest.mark.parametrize(
    "press", [partial(signal.raise_signal, signal.SIGINT), fail], ids=["signal", "exception"]
)
def test_ctrl_c_during_any_forward_pass(
    press: Callable[[], None], engine: qualms.Sketch | str
) -> None:
    model = net.mlp().train()
    want = qualms.class_gradient_norms(model, X, engine=engine).norms
    before = fingerprint(model)
    for when in (1, 2, 4):
        calls = 0

        def interrupt(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == when:  # noqa: B023
                press()

        handle = model[3].register_forward_hook(interrupt)  # type: ignore[index]
        try:
            with pytest.raises(KeyboardInterrupt):
                qualms.class_gradient_norms(model, X, engine=engine)
        finally:
            handle.remove()
        usable(model, before, want, engine)


def test_a_signal_waits_for_the_next_pass_and_then_for_the_end() -> None:
    done = []

    def work() -> None:
        with interrupts.defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("half of something")
            if len(done) == 1:
                interrupts.deliver()
            done.append("all of something")

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            work()
    assert done == ["half of something", "half of something", "all of something"]


def test_a_model_that_hangs_is_left_at_the_second_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE", -1.0)

    def hang() -> None:
        with interrupts.defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("this is not reached")

    with pytest.raises(KeyboardInterrupt):
        hang()


def test_a_handler_of_the_users_own_is_asked() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        model = net.mlp()
        model.register_forward_pre_hook(
            lambda *_: signal.raise_signal(signal.SIGINT) if not heard else None
        )
        qualms.class_gradient_norms(model, X)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_threads_that_get_no_signals_are_let_alone() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(qualms.score(net.mlp(), X, "regrad")))
    thread.start()
    thread.join()
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["exact", "sketch"])
def test_signals_at_any_moment(engine: str) -> None:
    """In a process of its own: Ctrl-C at every few steps of the code that switches things on and
    off.
    """
    program = f"""
        import signal, sys, warnings, torch, qualms
        from tests.helpers.model_state import fingerprint, same

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).train()
        x, switches = torch.randn(3, 4), ("contextlib", "functorch", "forward_ad", "stateless", "overrides", "guard")
        engine = "exact" if "{engine}" == "exact" else qualms.Sketch(2)
        steps = 0

        def count(frame, event, argument):
            global steps
            if any(part in frame.f_code.co_filename for part in switches):
                steps += 1
                if steps == when:
                    signal.raise_signal(signal.SIGINT)

        def score(at):
            global steps, when
            steps, when = 0, at
            try:
                sys.setprofile(count)
                qualms.score(model, x, "regrad", engine=engine)
            finally:
                sys.setprofile(None)
            return steps

        want, before, interrupted = qualms.score(model, x, "regrad", engine=engine), fingerprint(model), 0
        total = score(-1)
        for at in range(1, total, max(1, total // 300)):
            try:
                score(at)
            except KeyboardInterrupt:
                interrupted += 1
            after = fingerprint(model)
            assert all(same(before[key], after[key]) for key in before), at
            assert torch.equal(qualms.score(model, x, "regrad", engine=engine), want), at
        print(total, interrupted)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 250
