"""The pages of the documentation can be read: each is short, but for tables and code, and in the site's menu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
GENERATED = {"methods.md", "papers.md", "privacy.md"}  # by `make refresh`, from the declarations
LINES, WIDTH = 150, 120


def prose(text: str) -> list[str]:
    """The lines of a page that are no table, no code, and no comment; blank ones are among them."""
    text = re.sub(r"<!-- table: .*?<!-- end of table -->|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```+).*?^\1\2 *$\n?", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if not line.lstrip().startswith("|")]


def length(text: str) -> int:
    """How many lines of 120 characters the prose takes."""
    return sum(max(1, -(-len(line) // WIDTH)) for line in prose(text))


def test_tables_code_and_comments_do_not_count() -> None:
    table, code, inner = "| a | b |\n| - | - |\n", "```bash\nls\n\n```\n", "  ```text\n  y\n  ```\n"
    text = f"# Title\n\n{table}\n{code}<!-- claim: none -->\n{'x' * 241}\n{inner}"
    assert prose(text) == ["# Title", "", "", "", "x" * 241]
    assert length(text) == 7


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED])
def test_a_page_is_short(page: str) -> None:
    """Who has more to say has two kinds of readers, and a page for each."""
    found = length((DOCS / page).read_text(encoding="utf-8"))
    assert found <= LINES, f"docs/{page}: {found} lines outside tables and code, {LINES} are allowed"


def test_the_menu_has_every_page_once() -> None:
    menu = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == [page for page in PAGES if not page.startswith(("examples/", "results/data/"))]
