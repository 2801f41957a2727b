"""What `make` installs: the demo's packages for the demo, the tools for tests and docs when they
are asked for.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READ = (
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
    "requirements-peers.txt",
    "requirements-imagenet.txt",
)

if shutil.which("make") is None:
    pytest.skip("there is no make", allow_module_level=True)


def installs(folder: Path, target: str) -> list[str]:
    """The lines with which make would install something."""
    done = subprocess.run(
        ["make", "-n", target], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return [line for line in done.stdout.splitlines() if "pip install" in line]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in READ:
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (0, 0))
    return tmp_path


def installed(clone: Path, *marks: str) -> Path:
    (clone / ".venv").mkdir(exist_ok=True)
    for age, mark in enumerate(marks):
        (clone / ".venv" / mark).touch()
        os.utime(clone / ".venv" / mark, (1000 + age, 1000 + age))
    return clone


def test_the_demo_installs_its_own_packages_and_no_tools(clone: Path) -> None:
    (line,) = installs(clone, "demo")
    assert '".[app]"' in line
    assert "dev" not in line
    assert "requirements" not in line


def test_a_second_demo_installs_nothing(clone: Path) -> None:
    assert installs(installed(clone, ".app"), "demo") == []


def test_the_tests_add_the_tools_to_what_the_demo_installed(clone: Path) -> None:
    tools, peers = installs(installed(clone, ".app"), "test")
    assert '".[app,dev]"' in tools
    assert "requirements-peers.txt" in peers


def test_after_the_tests_nothing_is_missing(clone: Path) -> None:
    installed(clone, ".app", ".dev")
    assert installs(clone, "demo") == installs(clone, "test") == []


def test_only_the_tests_of_the_service_and_of_ray_install_them(clone: Path) -> None:
    installed(clone, ".app", ".dev")
    for target in ("test-serve", "test-ray"):
        (line,) = installs(clone, target)
        assert '".[app,dev,serve,mlflow,ray]"' in line
    assert not any(
        "serve" in one for target in ("demo", "test", "docs") for one in installs(clone, target)
    )


def test_only_all_the_tests_install_the_weights_of_imagenets_networks(clone: Path) -> None:
    assert any("requirements-imagenet.txt" in line for line in installs(clone, "test-all"))
    for target in ("demo", "test", "docs", "check"):
        assert not any("imagenet" in line for line in installs(clone, target))


def test_every_call_names_the_pinned_torch_so_that_one_build_is_fetched() -> None:
    pin = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    calls = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "pip install" in line and '".[' in line
    ]
    assert len(calls) == 3
    assert all(pin in call and "-c constraints.txt" in call for call in calls)


def test_every_package_of_the_extras_that_make_installs_is_pinned() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    wanted = {
        one.split(">=")[0].split("[")[0].lower()
        for extra in ("app", "dev", "serve", "mlflow", "ray", "scale")
        for one in extras[extra]
    }
    assert wanted <= pinned, wanted - pinned


SMALL_DEMO = """
import sys
for name in ("beartype", "hypothesis", "IPython", "matplotlib", "mkdocs", "nbclient", "nbformat", "pandas", "psutil",
             "playwright", "pytest", "timm", "torchvision", "transformers", "yaml"):
    sys.modules[name] = None
import qualms.cli.demo_command as command
import qualms.demo as demo

demo.IMAGES_PER_KIND, demo.EPOCHS, demo.TRAININGS, demo.TIMED_IMAGES, command.RESAMPLES = 8, 1, 1, 2, 20
demo.every_method = lambda: {spec: demo.parse(spec) for spec in ("regrad+layers", "entropy", "laplace")}
command.demo(command.Path("report.html"))
"""


@pytest.mark.slow
def test_the_demo_needs_no_tools_for_tests_and_docs(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", SMALL_DEMO],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "What a network for digits does not know" in page
    assert page.rstrip().endswith("</html>")
