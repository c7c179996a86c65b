"""Test that each page of the documentation is short, as are all together, with working links and menu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
MADE = ["index.md", "methods.md", "papers.md", "what_leaves.md"]  # `make docs` alone writes them
MARKED = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)
CODE = re.compile(r"^( *)(```+).*?^\1\2 *$\n?", re.DOTALL | re.MULTILINE)
LINES, WIDTH = 150, 120
WORDS = 75_000


def prose(text: str) -> list[str]:
    """Return the lines of a page that are no table, no code, and no comment; blank ones are among them."""
    text = CODE.sub("", re.sub(r"<!--.*?-->", "", MARKED.sub("", text), flags=re.DOTALL))
    return [line for line in text.splitlines() if not line.lstrip().startswith("|")]


def length(text: str) -> int:
    """Return how many lines of 120 characters the prose takes."""
    return sum(max(1, -(-len(line) // WIDTH)) for line in prose(text))


def test_tables_code_and_comments_do_not_count() -> None:
    table, code, inner = "| a | b |\n| - | - |\n", "```bash\nls\n\n```\n", "  ```text\n  y\n  ```\n"
    text = f"# Title\n\n{table}\n{code}<!-- claim: none -->\n{'x' * 241}\n{inner}"
    assert prose(text) == ["# Title", "", "", "", "x" * 241]
    assert length(text) == 7


def test_all_texts_together_are_short() -> None:
    """Hold the words of every text for readers, as `wc` counts them; one that grows makes another one shorter."""
    folders = ("docs", "tests", "poc", "custom")
    texts = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in texts) <= WORDS


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    """Check that a longer page is split, as it then has two kinds of readers."""
    found = length((DOCS / page).read_text(encoding="utf-8"))
    assert found <= LINES, f"docs/{page}: {found} lines outside tables and code, {LINES} are allowed"


def test_the_menu_has_every_page_once() -> None:
    menu = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(
        [*MADE, *(page for page in PAGES if not page.startswith(("examples/", "results/data/")))]
    )


RIVALS = [page for page in PAGES if "/" not in page and "## Deviations\n" in (DOCS / page).read_text(encoding="utf-8")]


def test_a_rivals_page_has_the_template_and_few_words() -> None:
    assert len(RIVALS) == 30
    for page in RIVALS:
        text = (DOCS / page).read_text(encoding="utf-8")
        headings = ["Formula", "Deviations", "What leaves a site", "Measured"]
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == headings, page
        assert len(text.split()) <= 250, page


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("path", [*sorted(ROOT.glob("*.md")), *(DOCS / page for page in PAGES)], ids=lambda p: p.name)
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", path.read_text(encoding="utf-8"))):
        if not target.startswith(("http", "mailto")):
            file, _, anchor = target.partition("#")
            found = path.parent / file if file else path
            assert found.is_file(), target
            assert not anchor or anchor in anchors(found), target
