"""Pictures of the page as files of their own: beside the results of a run, and for ``fairflare show``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fairflare.base.disk.files import write_whole
from fairflare.base.own_errors import lacking_package
from fairflare_lab.page.content import Picture
from fairflare_lab.page.material import of_one, page_run
from fairflare_lab.page.style import drawn

BESIDE = {"map_1": "som_map.png", "report_mu": "mu.png"}  # the page's name, and the file's


def draw_pictures(results: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[str]:
    """Draw FedMRL's map of the last round and every site's mu over the rounds into ``folder``, where a run has them.

    Args:
        results: of :func:`fairflare.reporting.results.read_document`.
        folder: gets the files of :data:`BESIDE`.

    Returns:
        Lines for the log: the files, or why there are none. Never raises: a picture must not cost a run.
    """
    lines = []
    try:
        from fairflare_lab.page.reports import reports

        for section in reports(of_one(page_run(results))):
            for part in section.parts:
                if isinstance(part, Picture) and part.name in BESIDE:
                    path = Path(folder) / BESIDE[part.name]
                    png = drawn(part.name, part.draw).png
                    write_whole(path, partial(Path.write_bytes, data=png), durable=False)
                    lines.append(f"picture: {path}")
    except Exception as error:
        lacking = lacking_package(error)
        lines.append(
            f"no pictures: {lacking}" if lacking else f"a picture could not be drawn: {type(error).__name__}: {error}"
        )
    return lines
