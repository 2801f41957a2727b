"""The commands, on the bundled digits: what they print, write and refuse."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qualms.cli import main
from qualms.cli.options import split_list
from qualms.data import Images, load
from tests.helpers.commands import run


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("weights") / "digits.pt"
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, "train", "digits", "--epochs", "3", "--out", str(file)) == 0
    return str(file)


def test_training_prints_the_accuracy_and_writes_the_weights(
    data_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "train", "digits", "--epochs", "2", "--count", "300") == 0
    out = capsys.readouterr().out
    assert re.match(
        r"digits-cnn on digits: accuracy \d+\.\d\d % on 360 test images after epoch [12] of 2", out
    )
    assert (
        torch.load(data_here / "runs" / "digits-digits-cnn-seed0.pt", weights_only=True)["network"]
        == "digits-cnn"
    )


def test_bench_ood_prints_a_row_for_each_method_and_keeps_them(
    data_here: Path,
    weights: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    np.savez(
        data_here / "noise.npz", x=torch.randint(0, 256, (40, 8, 8), dtype=torch.uint8).numpy()
    )
    command = (
        "bench",
        "ood",
        "--id",
        "digits",
        "--ood",
        "noise.npz",
        "--weights",
        weights,
        "--count",
        "40",
    )
    more = ("--methods", "regrad+layers(0.2),entropy,mc-dropout", "--out", "rows.jsonl")
    assert run(monkeypatch, *command, *more) == 0
    out = capsys.readouterr().out
    assert "digits → noise: 40 and 40 images" in out
    assert re.search(r"\| regrad\+layers\(0\.2\) \| \d+\.\d\d \[", out)
    assert "- digits-cnn: " in out
    assert "- mc-dropout: mc-dropout needs a dropout layer" in out
    before = (data_here / "rows.jsonl").read_bytes()
    assert run(monkeypatch, *command, *more, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == ["left out", "accuracy", "ood", "ood"]
    assert (data_here / "rows.jsonl").read_bytes() == before


@pytest.mark.slow
def test_bench_calibration_and_runtime_and_ablation_and_active_run(
    data_here: Path,
    weights: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ("--weights", weights, "--count", "40")
    assert (
        run(monkeypatch, "bench", "calibration", "--id", "digits", *few, "--methods", "entropy,gen")
        == 0
    )
    assert "| paper's rAULC |" in capsys.readouterr().out
    assert (
        run(
            monkeypatch,
            "bench",
            "runtime",
            "--id",
            "digits",
            "--count",
            "32",
            "--methods",
            "entropy,regrad",
        )
        == 0
    )
    assert "| paper's, Entropy = 1 (ResNet-18, CIFAR-10) |" in capsys.readouterr().out
    np.savez(
        data_here / "noise.npz",
        x=np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8),
    )
    assert run(monkeypatch, "bench", "ablation", "--id", "digits", "--ood", "noise.npz", *few) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("UNGrad+layers+smooth", "REGrad*", "λ → ∞", "σ = 0.05"))
    small = (
        "--start",
        "10",
        "--more",
        "10",
        "--cycles",
        "1",
        "--epochs",
        "2",
        "--pool",
        "40",
        "--validation",
        "20",
    )
    assert (
        run(monkeypatch, "bench", "active", "--id", "digits", "--methods", "random,entropy", *small)
        == 0
    )
    out = capsys.readouterr().out
    assert "| Random " in out
    assert "20 to 20" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("bench", "ood", "--id", "digits"), "ood needs --ood"),
        (
            ("bench", "calibration", "--id", "digits"),
            "digits-cnn has no weights; train it with `qualms train`",
        ),
        (("bench", "calibration", "--id", "nowhere"), "no published network for 'nowhere'"),
        (
            ("bench", "calibration", "--id", "cifar10"),
            "put cifar10_akamaster_resnet20-12fca82f.th into",
        ),
        (("bench", "runtime", "--id", "digits", "--methods", "regard"), "did you mean regrad"),
        (
            ("bench", "runtime", "--id", "digits", "--mean", "0.5"),
            "--mean and --std belong together",
        ),
        (
            ("bench", "runtime", "--id", "digits", "--device", "cud"),
            "device 'cud' is not available",
        ),
        (("bench", "active", "--id", "folder"), "bench active needs a known dataset"),
        (
            ("bench", "ood", "--id", "digits", "--ood", "digits"),
            "--ood names digits, the dataset that the network knows",
        ),
        (
            ("bench", "active", "--id", "digits", "--methods", "mc-dropout"),
            "no method can be used: mc-dropout",
        ),
        (
            ("bench", "active", "--id", "digits", "--methods", "entropy", "--diversity", "2"),
            "needs a gradient score",
        ),
        (("reproduce", "table1"), "no part of table1 can be computed: "),
        (("reproduce", "table9"), "there is no table 'table9'"),
        (("reproduce", "table1", "--preset", "gpu"), "there is no preset 'gpu'"),
        (("train", "omniglot"), "there is no recipe for 'omniglot'"),
        (("train", "mnist"), "train-images-idx3-ubyte"),
    ],
)
def test_what_a_user_can_put_right_is_told_in_one_sentence(
    data_here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    assert run(monkeypatch, *words) == 1
    err = capsys.readouterr().err
    assert err.startswith("qualms: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("task", "option"),
    [
        ("calibration", "--ood"),
        ("active", "--std"),
        ("runtime", "--cycles"),
        ("ablation", "--methods"),
    ],
)
def test_an_option_that_a_task_does_not_look_at_is_refused(
    data_here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    task: str,
    option: str,
) -> None:
    assert run(monkeypatch, "bench", task, "--id", "digits", option, "3") == 2
    assert f"No such option: {option}" in capsys.readouterr().err
    assert run(monkeypatch, "bench", task, "--help") == 0
    assert f"{option} " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("bench", "nothing", "--id", "digits"),
            "there is no task 'nothing'; choose one of ood, calibration, ",
        ),
        (("bench", "calibrate"), "there is no task 'calibrate'; did you mean calibration?"),
        (("reprodcue", "table1"), "there is no command 'reprodcue'; did you mean reproduce?"),
        (("xyzzy",), "there is no command 'xyzzy'; choose one of demo, score, "),
    ],
)
def test_a_name_that_is_mistyped_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    assert run(monkeypatch, *words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"qualms: {told}")
    assert err.count("\n") == 1


def test_bench_lists_its_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "bench", "--help") == 0
    out = capsys.readouterr().out
    assert all(
        f" {task} " in out for task in ("ood", "calibration", "ablation", "runtime", "active")
    )


def test_a_command_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "qualms.cli.reproduce_command", raising=False)
    monkeypatch.delitem(sys.modules, "qualms.cli.progress_bar", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert run(monkeypatch, "reproduce") == 1
    assert (
        capsys.readouterr().err
        == "qualms: `qualms reproduce` needs rich.console; run pip install '.[app]' in a clone of qualms.\n"
    )


@pytest.mark.slow
def test_test_images_are_never_learnt_from(
    data_here: Path,
    weights: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = load("digits")
    assert images.labels is not None
    for name, keys in (("alone.npz", ("x", "y")), ("both.npz", ("x_test", "y_test"))):
        arrays = dict(zip(keys, (images.pixels.numpy(), images.labels.numpy()), strict=True))
        more = (
            {"x_train": load("digits", split="train").pixels.numpy()} if name == "both.npz" else {}
        )
        np.savez(data_here / name, **arrays, **more)
    command = (
        "bench",
        "calibration",
        "--model",
        "digits-cnn",
        "--weights",
        weights,
        "--count",
        "32",
    )
    assert run(monkeypatch, *command, "--methods", "laplace,entropy", "--id", "alone.npz") == 0
    assert re.search(r"- laplace: .*training", capsys.readouterr().out)
    assert run(monkeypatch, *command, "--methods", "laplace,entropy", "--id", "both.npz") == 0
    assert "| laplace |" in capsys.readouterr().out


@pytest.mark.slow
def test_training_images_are_read_only_for_methods_that_learn_from_them(
    data_here: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def noted(*args: Any, **more: Any) -> Images:
        asked.append(args[2])
        return load(*args, **more)

    monkeypatch.setattr("qualms.cli.input_images.load", noted)
    command = ("bench", "calibration", "--id", "digits", "--weights", weights, "--count", "32")
    assert run(monkeypatch, *command, "--methods", "entropy") == 0
    assert asked == ["test"]
    assert run(monkeypatch, *command, "--methods", "laplace") == 0
    assert asked == ["test", "test", "train"]


def test_datasets_whose_folders_have_one_name_are_told_apart(
    data_here: Path,
    weights: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value, folder in enumerate(("a", "b")):
        (data_here / folder).mkdir()
        np.savez(data_here / folder / "set.npz", x=np.full((20, 8, 8), 200 * value, np.uint8))
    command = (
        "bench",
        "ood",
        "--id",
        "digits",
        "--weights",
        weights,
        "--count",
        "20",
        "--methods",
        "entropy",
    )
    assert run(monkeypatch, *command, "--ood", "a/set.npz,b/set.npz,b/set.npz") == 0
    out = capsys.readouterr().out
    assert re.findall(r"digits → (\S+):", out) == ["a/set.npz", "b/set.npz"]
    assert "±" not in out


def test_a_network_of_other_classes_is_refused(
    data_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (data_here / "mine.py").write_text(
        "from qualms.models.cnn import paper_cnn\n\ndef hundred():\n    return paper_cnn(1, 8, 100)\n"
    )
    assert (
        run(
            monkeypatch,
            "bench",
            "calibration",
            "--id",
            "digits",
            "--model",
            "mine:hundred",
            "--methods",
            "msp",
        )
        == 1
    )
    assert "mine:hundred outputs 100 classes, but digits has 10" in capsys.readouterr().err


def test_images_are_resized_to_what_the_network_takes(
    data_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (data_here / "larger.py").write_text(
        "from qualms.models.cnn import paper_cnn\n\ndef net():\n    return paper_cnn(3, 16)\n"
    )
    normal = (
        "--size",
        "16",
        "--mean",
        "0.5,0.5,0.5",
        "--std",
        "0.5,0.5,0.5",
        "--methods",
        "msp",
        "--count",
        "40",
    )
    assert (
        run(monkeypatch, "bench", "calibration", "--id", "digits", "--model", "larger:net", *normal)
        == 0
    )
    assert "40 images" in capsys.readouterr().out


def test_debug_shows_where_it_happened(data_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["qualms", "--debug", "reproduce", "table9"])
    with pytest.raises(ValueError, match="table9"):
        main()


def test_a_defect_is_told_in_one_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from qualms.cli import methods_command as methods

    def broken() -> None:
        raise RuntimeError("a nut\nand a bolt")

    monkeypatch.setattr(methods, "list_methods", broken)
    assert run(monkeypatch, "methods") == 3
    assert (
        capsys.readouterr().err
        == "qualms: an unexpected error occurred, RuntimeError: a nut; pass --debug for a traceback.\n"
    )
    assert run(monkeypatch, "methods", "--no-such-option") == 2


def test_on_a_terminal_bars_tell_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from qualms.cli import progress_bar

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar.show_progress("first tokens") as progress:
        time.sleep(0.15)
        progress("tokens", 1, 9)
        time.sleep(0.15)
    shown = screen.getvalue()
    assert shown.index("first tokens …") < shown.index("1/9 tokens, ")
    assert "/?" not in shown
    assert re.search(r"\d/s", shown)


def test_a_bar_counts_from_the_start_and_tells_the_time_left_from_the_first_image_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qualms.cli import progress_bar

    shown: list[str] = []
    now = iter((0.0, 0.0, 2.0, 6.0))
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(
        progress_bar.Progress, "update", lambda *_, description="", **__: shown.append(description)
    )
    with progress_bar.show_progress("images", done=7, total=13) as progress:
        progress("images", 8, 13)
        progress("images", 11, 13)
    counted = [text for text in shown if text]
    assert counted == [
        "7/13 images",
        "8/13 images, 2.0 s each, 0:10 left",
        "11/13 images, 1.5 s each, 0:03 left",
    ]


def test_a_log_file_gets_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from qualms.cli import progress_bar

    now = iter((0.0, 10.0, 31.0, 40.0, 62.0))
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(now))
    with progress_bar.show_progress() as progress:
        for i in range(1, 5):
            progress("images scored", 31 * i, 310)
    assert capsys.readouterr().err.splitlines() == [
        "images scored: 62 of 310, 2.0/s, 2:04 left",
        "images scored: 124 of 310, 2.0/s, 1:33 left",
    ]


def test_the_version_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import qualms

    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == qualms.__version__


def test_without_its_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "qualms.cli.commands")
    monkeypatch.setitem(sys.modules, "typer", None)
    assert run(monkeypatch, "--version") == 1
    assert (
        capsys.readouterr().err
        == "qualms: the command line needs typer; run pip install '.[app]' in a clone of qualms.\n"
    )


def test_commas_inside_brackets_do_not_part_specs() -> None:
    assert split_list("regrad+smooth(0.02,8), entropy,") == ["regrad+smooth(0.02,8)", "entropy"]


@pytest.mark.slow
def test_the_networks_own_normalization_is_used(
    data_here: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = (
        "bench",
        "calibration",
        "--id",
        "digits",
        "--weights",
        weights,
        "--methods",
        "msp",
        "--count",
        "9",
    )
    assert run(monkeypatch, *command, "--out", "own.jsonl") == 0
    assert run(monkeypatch, *command, "--out", "given.jsonl", "--mean", "0.1", "--std", "0.2") == 0
    about = [
        json.loads((data_here / f"{name}.jsonl").read_text().splitlines()[0])
        for name in ("own", "given")
    ]
    assert [(row["mean"], row["std"]) for row in about] == [([0.3053], [0.376]), ([0.1], [0.2])]
