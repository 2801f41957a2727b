"""Weights on disk: all of them fit, or the network stays as it was and one sentence says why."""

import builtins
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.models import fit_state, load_model, read_state


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def holds(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + k: v for k, v in state.items()}


WRAPPINGS: dict[str, Any] = {
    "bare": lambda s: s,
    "state_dict": lambda s: {"state_dict": s, "epoch": 3, "loss": torch.tensor(0.1)},
    "model": lambda s: {"model": s, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}},
    "model_state_dict": lambda s: {"model_state_dict": s, "optimizer_state_dict": {}},
    "net": lambda s: {"net": s, "acc": 91.7},
    "nested": lambda s: {"model": {"state_dict": s}},
    "entries that are no tensors": lambda s: {**s, "epoch": 7, "name": "mine", "best": None},
    "module.": lambda s: prefixed(s, "module."),
    "model.": lambda s: prefixed(s, "model."),
    "base_model.": lambda s: prefixed(s, "base_model."),
    "_orig_mod.": lambda s: prefixed(s, "_orig_mod."),
    "nested prefixes": lambda s: {"state_dict": prefixed(s, "model._orig_mod.module.")},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_weights_are_found_in_whatever_they_were_saved_with(wrapping: str, tmp_path: Path) -> None:
    state = network().state_dict()
    model = network()
    fit_state(model, read_state(saved(tmp_path / "w.pt", WRAPPINGS[wrapping](state))))
    assert holds(model, state)


def test_a_prefix_that_is_the_networks_own_name_for_a_part_stays() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 2)

    state = Wrapped().state_dict()
    for given in (state, prefixed(state, "module."), prefixed(state, "model.")):
        model = Wrapped()
        fit_state(model, given)
        assert holds(model, state)


def test_a_prefix_that_only_some_names_have_is_no_prefix() -> None:
    state = network().state_dict()
    mixed = {**prefixed(state, "module."), "head.weight": torch.zeros(1)}
    with pytest.raises(QualmsError, match=r"unexpected \(first 'module.0.weight'\)"):
        fit_state(network(), mixed)


def test_safetensors(tmp_path: Path) -> None:
    state = network().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    model = network()
    fit_state(model, read_state(tmp_path / "w.safetensors"))
    assert holds(model, state)


def test_a_tensor_with_two_names_need_not_be_stored_twice(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    before, model = tied(), tied()
    save_model(before, str(tmp_path / "w.safetensors"))
    assert len(read_state(tmp_path / "w.safetensors")) == 3
    fit_state(model, read_state(tmp_path / "w.safetensors"))
    assert holds(model, before.state_dict())


def test_without_safetensors_an_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(network().state_dict(), tmp_path / "w.safetensors")
    plain = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return plain(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        QualmsError, match=r"needs the package safetensors; run pip install '\.\[app\]'"
    ):
        read_state(tmp_path / "w.safetensors")


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.double])
def test_weights_take_the_networks_precision(dtype: torch.dtype) -> None:
    state = network().to(dtype).state_dict()
    model = network()
    fit_state(model, state)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model[0].weight, state["0.weight"].float())


def test_the_counter_of_batches_may_be_missing() -> None:
    state = network().state_dict()
    del state["1.num_batches_tracked"]
    model = network()
    fit_state(model, state)
    assert torch.equal(model[3].weight, state["3.weight"])


def test_what_does_not_fit_is_counted_and_named_and_the_network_stays_as_it_was() -> None:
    state = network().state_dict()
    state["3.weight"] = torch.zeros(5, 4)
    state["3.bias"] = torch.zeros(5)
    state["head.weight"] = state.pop("0.weight")
    state["1.running_var"] += 1
    del state["0.bias"]
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(QualmsError) as caught:
        fit_state(model, state, file="weights.pt", network="mine")
    assert str(caught.value) == (
        "weights.pt does not fit mine: 2 keys missing (first '0.weight'), 1 key unexpected (first 'head.weight'), "
        "2 keys with a different shape (first '3.weight': (5, 4) in the file, (2, 4) here); "
        "name the network it was saved from."
    )
    assert holds(model, before)


def test_another_number_of_classes_is_told(tmp_path: Path) -> None:
    saved(tmp_path / "w.pt", load_model("mnist-cnn", classes=7).state_dict())
    with pytest.raises(
        QualmsError,
        match=r"fit mnist-cnn: 2 keys with a different shape .*\(7, 128\).*; pass classes=",
    ):
        load_model("mnist-cnn", tmp_path / "w.pt")
    assert load_model("mnist-cnn", tmp_path / "w.pt", classes=7)(
        torch.rand(1, 1, 28, 28)
    ).shape == (1, 7)


class RunsCode:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_a_file_that_could_run_code_is_refused_before_it_does(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    state = network().state_dict()
    path = saved(tmp_path / "w.pt", {"state_dict": state, "extra": RunsCode(mark)})
    with pytest.raises(
        QualmsError, match=r"\(posix.system\) and could run code.*save only its state_dict\(\)"
    ):
        read_state(path)
    for protocol in (2, 4):
        (tmp_path / "w.pkl").write_bytes(pickle.dumps(RunsCode(mark), protocol))
        with pytest.raises(
            QualmsError, match=r"w[.]pkl is damaged or not a torch checkpoint|could run code"
        ):
            read_state(tmp_path / "w.pkl")
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file was harmless all along"


def test_a_whole_network_and_torchscript_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(
        QualmsError, match=r"contains more than tensors \(torch.nn.modules.container.Sequential\)"
    ):
        read_state(saved(tmp_path / "w.pt", network()))
    with warnings.catch_warnings(
        action="ignore", category=DeprecationWarning
    ):  # of TorchScript altogether
        traced = torch.jit.trace(nn.Linear(3, 2), torch.rand(1, 3))
        torch.jit.save(traced, tmp_path / "script.pt")
    with pytest.raises(QualmsError, match=r"contains more than tensors \(TorchScript\)"):
        read_state(tmp_path / "script.pt")


def test_files_that_are_missing_or_damaged_get_one_sentence(tmp_path: Path) -> None:
    whole = saved(tmp_path / "w.pt", network().state_dict()).read_bytes()
    torch.save(network().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(network().state_dict(), tmp_path / "w.safetensors")
    damaged = {
        "cut.pt": whole[: len(whole) // 2],
        "old-cut.pt": (tmp_path / "old.pt").read_bytes()[:-5],
        "empty.pt": b"",
        "page.pt": b"<html>404</html>",
        "words.pt": b"hello world" * 30,
        "cut.safetensors": (tmp_path / "w.safetensors").read_bytes()[:-5],
        "empty.safetensors": b"",
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(QualmsError, match=re.escape(f"{name} is damaged or not ")) as caught:
            read_state(tmp_path / name)
        assert "\n" not in str(caught.value), name
    for name in ("none.pt", "none.safetensors", "."):
        with pytest.raises(QualmsError, match="there is no checkpoint file"):
            read_state(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"epoch": 3, "weights": {"a": torch.zeros(1)}}, "'epoch', 'weights'"),
        ([torch.zeros(1)], "a list"),
        (torch.zeros(1), "a Tensor"),
        ({"state_dict": {}}, "nothing"),
    ],
)
def test_a_file_without_named_tensors_says_what_it_has(
    content: Any, found: str, tmp_path: Path
) -> None:
    with pytest.raises(QualmsError, match=f"contains no named tensors, only {found};"):
        read_state(saved(tmp_path / "w.pt", content))
