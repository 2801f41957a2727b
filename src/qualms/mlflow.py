"""A `Scorer` as a model of MLflow: saved with its network, loaded and asked like any other. Needs
its own extra.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from qualms.data.images import number_of
from qualms.errors import QualmsError
from qualms.gradients.input_data import batches
from qualms.scorer import Scorer
from qualms.version import __version__

FILE = "scorer.pkl"


def save_model(scorer: Scorer, path: str | Path, **more: Any) -> None:
    """Write a scorer, its network and its threshold as a model that `mlflow.pyfunc.load_model`
    reads.

    The loaded model's `predict` takes what the scorer takes, such as an array, or a table of
    numbers with a row for each input; it returns a pandas table as `Scored.to_pandas` does. Random
    draws follow an input's numbers, so that a row has the same score wherever it stands. Loading it
    unpickles it: load what you trust.

    Args:
        scorer: with all that its methods have; training data goes along.
        path: a folder that is not there yet.
        more: further arguments of `mlflow.pyfunc.save_model`, such as `signature` or `code_paths`.
    """
    cloudpickle, pyfunc = _packages()
    if Path(path).exists():
        raise QualmsError(f"{path} is there already; choose another folder.")
    needs = [f"qualms[mlflow]=={__version__}", f"torch=={torch.__version__.partition('+')[0]}"]
    with TemporaryDirectory() as folder:
        file = Path(folder) / FILE
        file.write_bytes(cloudpickle.dumps(scorer))
        given = {"pip_requirements": needs, **more}
        pyfunc.save_model(path=str(path), loader_module=__name__, data_path=str(file), **given)


class ScorerModel:
    """What MLflow asks."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """A table with a row for each input."""
        inputs = model_input.to_numpy() if hasattr(model_input, "to_numpy") else model_input
        if not isinstance(inputs, np.ndarray):
            return self.scorer(inputs).to_pandas()
        # Draws follow an input's numbers as the network gets them, so that its score depends
        # neither on its row nor on whether it came in 64 bits, as tables do.
        x = cast(
            torch.Tensor, next(batches(inputs, self.scorer.model))
        )  # of one array, one batch of one tensor
        rows = x.reshape(len(x), -1).contiguous().view(torch.uint8).numpy()
        return replace(
            self.scorer(x, numbers=[number_of(row) for row in rows]), ids=range(len(x))
        ).to_pandas()


def _load_pyfunc(path: str) -> ScorerModel:
    """What `mlflow.pyfunc.load_model` calls, by this name, with the place of the file."""
    cloudpickle, _ = _packages()
    return ScorerModel(cloudpickle.loads(Path(path).read_bytes()))


def _packages() -> tuple[Any, Any]:
    try:
        import cloudpickle
        from mlflow import pyfunc
    except ModuleNotFoundError as missing:
        raise QualmsError(
            f"qualms.mlflow needs {missing.name}; pip install '.[mlflow]' in a clone of qualms."
        ) from None
    return cloudpickle, pyfunc
