"""With torch, numpy and jaxtyping alone the library works; what needs more says what to install."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
for name in ("scipy", "sklearn", "PIL", "pyarrow", "safetensors", "typer", "rich", "transformers", "timm", "plotly",
             "matplotlib"):
    sys.modules[name] = None
import torch
import qualms
from qualms.models.cnn import mnist_cnn

torch.manual_seed(0)
x = torch.rand(4, 1, 28, 28)
u = qualms.score(mnist_cnn(), x)
assert u.shape == (4,) and len(qualms.select(mnist_cnn(), x, 2)) == 2
assert qualms.metrics.auroc(u[:2], u[2:]) >= 0
try:
    qualms.data.load("digits")
except qualms.QualmsError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_core_needs_no_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "pip install '.[app]' in a clone of qualms" in done.stdout
