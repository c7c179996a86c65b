"""What a run's model is worth at the site that was left out: the document beside the run's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field
from typing_extensions import Self

from fairflare.base.disk.files import write_whole


class Unseen(BaseModel, extra="forbid"):
    """Describe the performance of a run's common model at a site that was no part of the run.

    Attributes:
        site: name.
        metrics: of its test split; ``None``: undefined there.
        adapted: the same of the model with norm statistics of the site's own training images; empty: it has no such.
        best: of the model that validated best at the sites of the run; empty: there is none, or it is not common.
        best_is_last: that model is the last one.
        images: in its test split.
        resampled, adapted_resampled: the primary metric of the model and of the adapted one on draws of its test
            patients, the same draws; empty: none were made.
        unit, units: what was drawn (``patients``, ``volumes`` or ``images``), and how many of them it has.
        groups, adapted_groups: by ``<attribute>=<group>`` of people the sums of its test images
            (:mod:`fairflare.core.statistics.group_sums`), of the model and of the adapted one; empty: nobody asked.
        groups_kept: names of those that stay there.
        reason: why there is no figure; empty: there is one.
    """

    site: str
    metrics: dict[str, float | None] = Field(default_factory=dict)
    adapted: dict[str, float | None] = Field(default_factory=dict)
    best: dict[str, float | None] = Field(default_factory=dict)
    best_is_last: bool = False
    images: int | None = None
    resampled: list[float | None] = Field(default_factory=list)
    adapted_resampled: list[float | None] = Field(default_factory=list)
    unit: str = ""
    units: int | None = None
    groups: dict[str, dict[str, Any]] = Field(default_factory=dict)
    adapted_groups: dict[str, dict[str, Any]] = Field(default_factory=dict)
    groups_kept: list[str] = Field(default_factory=list)
    reason: str = ""

    FILE: ClassVar[str] = "unseen.json"  # beside a run's results.json

    def write(self, folder: Path) -> None:
        """Write it beside a run's results, whole or not at all."""
        text = self.model_dump_json(indent=2) + "\n"
        write_whole(folder / self.FILE, lambda path: path.write_text(text, "utf-8"), shared=True)

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Return whether a run has one."""
        return (folder / cls.FILE).is_file()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read it.

        Raises:
            ValueError: it is not there or damaged (names the file).
        """
        file = folder / cls.FILE
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{file}: no readable result of a left-out site ({error}); delete it and run again"
            ) from error
