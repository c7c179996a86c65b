"""Store the test of a run's model at a site that was left out, in a document beside the run's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field
from typing_extensions import Self

from fairflare.base.disk.files import write_whole


class Unseen(BaseModel):
    """Describe the performance of a run's common model at a site that did not take part in the run.

    Attributes:
        site: name of the left-out site.
        metrics: metrics of the last model on the site's test split; a value of ``None`` is undefined.
        adapted: metrics of the model with norm statistics of the site's own training images; empty for no such model.
        images: number of images in the site's test split.
        resampled, adapted_resampled: the primary metric of the model, and of the adapted model, on the same draws of
            the site's test patients; empty if no draws were made.
        unit, units: unit of the draws (``patients``, ``volumes`` or ``images``); number of such units at the site.
        groups: sums over the site's test images by ``<attribute>=<group>`` of people
            (:mod:`fairflare.core.statistics.group_sums`), by the model or, if only the adapted model exists, by that;
            empty if not asked for.
        groups_kept: names of the groups that the site withholds.
        reason: reason why ``metrics`` is empty; an empty text if there are metrics.
    """

    site: str
    metrics: dict[str, float | None] = Field(default_factory=dict)
    adapted: dict[str, float | None] = Field(default_factory=dict)
    images: int | None = None
    resampled: list[float | None] = Field(default_factory=list)
    adapted_resampled: list[float | None] = Field(default_factory=list)
    unit: str = ""
    units: int | None = None
    groups: dict[str, dict[str, Any]] = Field(default_factory=dict)
    groups_kept: list[str] = Field(default_factory=list)
    reason: str = ""

    FILE: ClassVar[str] = "unseen.json"  # name of the file beside a run's results.json

    def write(self, folder: Path) -> None:
        """Write the document of the left-out site beside a run's results, atomically."""
        text = self.model_dump_json(indent=2) + "\n"
        write_whole(folder / self.FILE, lambda path: path.write_text(text, "utf-8"), shared=True)

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Return whether a run's results folder has the document of a left-out site."""
        return (folder / cls.FILE).is_file()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the document of a left-out site in a run's results folder.

        Raises:
            ValueError: the file is missing or damaged; the message names it.
        """
        file = folder / cls.FILE
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{file}: no readable result of a left-out site ({error}); delete it and run again"
            ) from error
