"""What surrounds the code agrees with it: one version everywhere, and a workflow that runs what
there is.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import qualms

ROOT = Path(__file__).parents[1]
GITHUB = sorted((ROOT / ".github").rglob("*.yml"))


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == qualms.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == qualms.__version__


@pytest.mark.parametrize("path", [*GITHUB, ROOT / ".pre-commit-config.yaml"], ids=lambda p: p.name)
def test_every_file_for_a_service_can_be_read(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_workflow_runs_targets_of_the_makefile() -> None:
    workflow: Any = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    commands = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    assert commands
    for command in commands:
        program, target = command.split()
        assert program == "make"
        assert target in targets
