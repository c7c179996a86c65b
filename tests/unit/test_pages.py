"""Test that each page of the documentation is short, as are all together, with working links and menu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
# What tools write, the one place that says so: whole pages by `make refresh`, and all between marks of tables.
GENERATED = {"methods.md", "papers.md", "privacy.md"}
MARKED = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)
CODE = re.compile(r"^( *)(```+).*?^\1\2 *$\n?", re.DOTALL | re.MULTILINE)
LINES, WIDTH = 150, 120
WORDS_BY_HAND, WORDS_GENERATED = 85_000, 25_000


def prose(text: str) -> list[str]:
    """Return the lines of a page that are no table, no code, and no comment; blank ones are among them."""
    text = CODE.sub("", re.sub(r"<!--.*?-->", "", MARKED.sub("", text), flags=re.DOTALL))
    return [line for line in text.splitlines() if not line.lstrip().startswith("|")]


def length(text: str) -> int:
    """Return how many lines of 120 characters the prose takes."""
    return sum(max(1, -(-len(line) // WIDTH)) for line in prose(text))


def words(texts: dict[str, str]) -> tuple[int, int]:
    """Count the words of pages by name: written by hand, and by tools; tables by hand count as the rest."""
    by_hand = {name: "" if name in GENERATED else MARKED.sub("", text) for name, text in texts.items()}
    everything = sum(len(text.split()) for text in texts.values())
    hand = sum(len(text.split()) for text in by_hand.values())
    return hand, everything - hand


def test_tables_code_and_comments_do_not_count() -> None:
    table, code, inner = "| a | b |\n| - | - |\n", "```bash\nls\n\n```\n", "  ```text\n  y\n  ```\n"
    text = f"# Title\n\n{table}\n{code}<!-- claim: none -->\n{'x' * 241}\n{inner}"
    assert prose(text) == ["# Title", "", "", "", "x" * 241]
    assert length(text) == 7


def test_words_are_of_a_hand_or_of_a_tool() -> None:
    table = "<!-- table: a measures -->\n| four | words | 1 |\n<!-- end of table -->"
    assert words({"a.md": f"two words\n{table} three\n"}) == (3, 17)
    assert words({"a.md": "| two | words |", "papers.md": "three more words"}) == (5, 3)


def test_all_pages_together_are_short() -> None:
    """Hold the limits; a page that grows makes another one shorter."""
    texts = {page: (DOCS / page).read_text(encoding="utf-8") for page in PAGES}
    hand, generated = words({"README.md": (ROOT / "README.md").read_text(encoding="utf-8"), **texts})
    assert hand <= WORDS_BY_HAND, "words of README.md and docs/, without what tools write"
    assert generated <= WORDS_GENERATED, "words that tools write"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED])
def test_a_page_is_short(page: str) -> None:
    """Check that a longer page is split, as it then has two kinds of readers."""
    found = length((DOCS / page).read_text(encoding="utf-8"))
    assert found <= LINES, f"docs/{page}: {found} lines outside tables and code, {LINES} are allowed"


def test_the_menu_has_every_page_once() -> None:
    menu = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == [page for page in PAGES if not page.startswith(("examples/", "results/data/"))]


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
