"""A `Scorer` as an MLflow model: saved with its network, loaded and called like any other.

Needs the extra `mlflow`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from qualms.data.images import hash_array
from qualms.errors import QualmsError
from qualms.gradients.input_data import batches
from qualms.scorer import Scorer
from qualms.version import __version__

PICKLE_NAME = "scorer.pkl"


def save_model(scorer: Scorer, path: str | Path, **more: Any) -> None:
    """Save a scorer, its network and its threshold as a model for `mlflow.pyfunc.load_model`.

    The loaded model's `predict` takes the same inputs as the scorer, such as an array, or a table
    of numbers with a row for each input. It returns a pandas table as `Scored.to_pandas` does.
    Random draws are seeded by a row's values, so a row has the same score at any position.
    Loading unpickles the scorer: only load models that you trust.

    Args:
        scorer: The scorer, which is pickled with all that its methods hold, such as training data.
        path: The path of a folder that does not exist yet.
        more: Further arguments of `mlflow.pyfunc.save_model`, such as `signature` or `code_paths`.

    Raises:
        QualmsError: If the folder exists, or if the extra is not installed.
    """
    cloudpickle, pyfunc = _import_mlflow()
    if Path(path).exists():
        raise QualmsError(f"{path} already exists; choose another folder.")
    arguments = {"pip_requirements": _list_requirements(), **more}
    with TemporaryDirectory() as folder:
        # MLflow copies this file into the model's folder.
        file = Path(folder) / PICKLE_NAME
        file.write_bytes(cloudpickle.dumps(scorer))
        pyfunc.save_model(
            path=str(path),
            loader_module=__name__,
            data_path=str(file),
            **arguments,
        )


class ScorerModel:
    """A loaded scorer as a model of MLflow, which calls `predict`.

    Args:
        scorer: The scorer that was saved.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Score inputs that a user passed to the loaded model.

        Args:
            model_input: An array, a pandas table with a row for each input, or anything else that
                the scorer takes.
            params: The parameters that MLflow passes; ignored.

        Returns:
            A pandas table with a row for each input.
        """
        inputs = model_input
        if hasattr(inputs, "to_numpy"):  # a pandas table
            inputs = inputs.to_numpy()
        if not isinstance(inputs, np.ndarray):
            return self.scorer(inputs).to_pandas()
        # An array is read as a single batch, which is one tensor in the network's dtype.
        x = cast(torch.Tensor, next(batches(inputs, self.scorer.model)))
        scored = self.scorer(x, numbers=_hash_rows(x))
        # The table shows positions as ids, not the hashes.
        return replace(scored, ids=range(len(x))).to_pandas()


def _hash_rows(x: torch.Tensor) -> list[int]:
    """Return a hash of each row, to pass as the `numbers` that decide random draws.

    So a row's score depends neither on its position nor, as the hash is of the network's own dtype,
    on whether the user's table held doubles.

    Args:
        x: The inputs as the network takes them, [n, ...].
    """
    # The bytes of each row, [n, bytes].
    rows = x.reshape(len(x), -1).contiguous().view(torch.uint8).numpy()
    return [hash_array(row) for row in rows]


def _load_pyfunc(path: str) -> ScorerModel:
    """Load a saved scorer; `mlflow.pyfunc.load_model` looks this function up by its name.

    Args:
        path: The path of the pickled scorer.
    """
    cloudpickle, _ = _import_mlflow()
    return ScorerModel(cloudpickle.loads(Path(path).read_bytes()))


def _list_requirements() -> list[str]:
    """Return the packages that a saved model needs, with versions, as pip takes them."""
    # pip finds 2.5.1, but not the build 2.5.1+cpu.
    torch_version = torch.__version__.partition("+")[0]
    return [f"qualms[mlflow]=={__version__}", f"torch=={torch_version}"]


def _import_mlflow() -> tuple[Any, Any]:
    """Import the modules cloudpickle and mlflow.pyfunc; raise an error if the extra is missing."""
    try:
        import cloudpickle
        from mlflow import pyfunc
    except ModuleNotFoundError as missing:
        raise QualmsError(
            f"qualms.mlflow needs {missing.name}; run pip install '.[mlflow]' in a clone of qualms."
        ) from None
    return cloudpickle, pyfunc
