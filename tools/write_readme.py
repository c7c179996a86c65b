"""Writes the README's method table, between its marks, from the catalog (``fairflare list --markdown``).

``python tools/write_readme.py`` after a method was added or changed; a test holds that the table is up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fairflare.federation.describe import method_table

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- methods: made by tools/write_readme.py -->", "<!-- end of methods -->"


def with_table(text: str) -> str:
    """The text with today's table.

    Raises:
        ValueError: the marks are not there once each, in their order.
    """
    parts = re.split(f"({re.escape(BEGIN)}|{re.escape(END)})", text)
    if parts[1::2] != [BEGIN, END]:
        raise ValueError(f"README.md must have {BEGIN} and {END}, once each")
    return "".join([parts[0], BEGIN, "\n", method_table(), "\n", END, parts[4]])


def main() -> int:
    """Writes it; 0."""
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
