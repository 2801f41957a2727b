"""Shapes are enforced in the tests: every function of qualms that annotates one checks what it
takes and returns.
"""

import inspect
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import jaxtyping
import pytest
import torch
from hypothesis import settings
from jaxtyping import AbstractArray, config, install_import_hook

# Some virtual machines announce AMX and trap on it: torch itself then dies on a product of bfloat16
# matrices. oneDNN reads this at its first product; the commands that tests start inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# A shell starts what runs in the background deaf to Ctrl-C; tests of it, and the commands that they
# start, are not.
signal.signal(signal.SIGINT, signal.default_int_handler)


def has_shape(annotation: Any) -> bool:
    """Whether there is a shape in it, or a string, which may have one."""
    if isinstance(annotation, str) or (
        inspect.isclass(annotation) and issubclass(annotation, AbstractArray)
    ):
        return True
    return any(map(has_shape, annotation if isinstance(annotation, list) else get_args(annotation)))


def where_there_are_shapes(check: Callable[..., Any]) -> Callable[..., Any]:
    """The check, for classes and functions that annotate a shape. Plain types are mypy's, and a
    third of the time.
    """

    def decorator(*, typechecker: Any) -> Callable[[Any], Any]:
        def decorated(of: Any) -> Any:
            annotated = any(map(has_shape, getattr(of, "__annotations__", {}).values()))
            return check(of, typechecker=typechecker) if annotated else of

        return decorated

    return decorator


jaxtyping.jaxtyped = where_there_are_shapes(jaxtyping.jaxtyped)  # which the hook puts on everything
install_import_hook("qualms", "beartype.beartype")
torch.set_num_threads(1)  # the tests run in parallel processes
# The same examples every time, however slow the machine is; CI goes on to more of them.
settings.register_profile(
    "fixed", deadline=None, derandomize=True, max_examples=100 if "CI" in os.environ else 50
)
settings.load_profile("fixed")


@pytest.fixture
def as_users_meet_it() -> Iterator[None]:
    """Without the tests' checks of annotations, which would be first to refuse a wrong argument."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run commands in, where no datasets are known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    return tmp_path


@pytest.fixture
def weights_here(workdir: Path) -> Path:
    """A folder to run commands in, with the weights of a network for digits."""
    from qualms.models import load_model

    torch.manual_seed(0)
    torch.save(load_model("digits-cnn").state_dict(), workdir / "weights.pt")
    return workdir
