"""Add pages that are in no file, and convert links out of ``docs/`` and Sphinx's notation, for ``make docs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import made_pages  # beside this file
from mkdocs.structure.files import File, Files

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the front page, the methods, the papers' settings, and what leaves a site."""
    for name, text in made_pages.pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace a link to a file of the repository by its text and path; a link within the site stays."""
    here = Path(page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        steps: list[str] = []
        for part in (here / link[2]).parts:
            if part == ".." and steps and steps[-1] != "..":
                steps.pop()
            else:
                steps.append(part)
        if steps[:1] != [".."]:
            return link[0]
        path = "/".join(step for step in steps if step != "..")
        return link[1] if link[1].strip("`") == path else f"{link[1]} (`{path}`)"

    return LINK.sub(named, markdown)


ROLE = re.compile(r":(?:py:)?(?:class|func|meth|mod|data|attr|exc):<code>~?([^<]+)</code>")
MATH = re.compile(r"<p>\.\. math::(.*?)</p>", re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Replace a role by the name that it names, without the package; a formula stays in TeX."""
    html = ROLE.sub(lambda role: f"<code>{role[1].removeprefix('fairflare.')}</code>", html)
    html = html.replace("<p>.. code-block:: python</p>", "")
    return MATH.sub(lambda formula: f"<pre><code>{formula[1].strip()}</code></pre>", html)
