"""Implement the option ``--mlflow`` of ``fairflare run`` and ``fairflare export``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from fairflare.flare.export.recipes import FairRecipe

ON_DISK = ("file:", "sqlite:")

MLflowUri: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="URI",
        help="The server also writes the curves to this MLflow store: file:///folder, sqlite:///file, http://host:port.",
    ),
]


def track_in_mlflow(recipe: FairRecipe, uri: str, *, here: bool = False) -> None:
    """Add FLARE's MLflow receiver to a job's recipe, so that the server also writes its curves to MLflow.

    Args:
        recipe: recipe of the job.
        uri: URI of the MLflow store.
        here: whether the server runs on this machine, so that a store on its disk can be tried before the run.

    Raises:
        ValueError: ``uri`` is no URI, mlflow is not installed, or the store cannot be opened.
    """
    from nvflare.recipe.utils import add_experiment_tracking

    if "://" not in uri:
        raise ValueError(f"--mlflow wants a URI, such as file:///home/me/mlruns or http://host:5000, got {uri!r}")
    if find_spec("mlflow") is None:
        raise ValueError("--mlflow needs the package mlflow, which is not installed: pip install 'fairflare[mlflow]'")
    if here and uri.startswith(ON_DISK):
        from mlflow.tracking import MlflowClient

        try:  # MLflow 3 refuses folders by default, and the run would lose its curves
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
        except Exception as error:
            raise ValueError(f"--mlflow {uri} cannot be opened: {type(error).__name__}: {error}") from error
    add_experiment_tracking(recipe, "mlflow", {"tracking_uri": uri})
