"""A document beside a run's ``results.json``, or in the folder of a comparison: written, found and read again."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel
from typing_extensions import Self

from fairflare.base.disk.files import write_whole


class Beside(BaseModel, extra="forbid"):
    """Base of these documents.

    Attributes:
        FILE: its name.
        CALLED: what it holds, for messages.
    """

    FILE: ClassVar[str]
    CALLED: ClassVar[str]

    def write(self, folder: Path) -> None:
        """Writes it, whole or not at all."""
        text = self.model_dump_json(indent=2) + "\n"
        write_whole(folder / self.FILE, lambda path: path.write_text(text, "utf-8"), shared=True)

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether it is there."""
        return (folder / cls.FILE).is_file()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads it.

        Raises:
            ValueError: it is not there or damaged (names the file).
        """
        file = folder / cls.FILE
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: no readable {cls.CALLED} ({error}); delete it and run again") from error
