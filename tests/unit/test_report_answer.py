"""Test the digits of a page's figures, and its style for print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fairflare.reporting.layout import Table, interval, number
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.page import write
from fairflare_lab.page.content import Page, Section
from fairflare_lab.page.material import read_material
from fairflare_lab.page.write import draw_and_render

TEMPLATES = Path(write.__file__).parent / "templates"


@pytest.mark.parametrize(
    ("value", "half", "told"),
    [
        (0.6628, 0.0303, "0.66 ± 0.03"), (0.6628, 0.3, "0.7 ± 0.3"), (0.66284, 0.0012, "0.663 ± 0.001"),
        (12.34, 3.0, "12 ± 3"), (0.6628, float("nan"), "0.663"), (0.6628, 0.0, "0.663 ± 0.000"),
        (0.8282, 1e-5, "0.828 ± 0.000"), (1e-5, 2e-6, "1e-05 ± 2e-06"), (0.00123, float("nan"), "0.0012"),
        (12.345, float("nan"), "12.3"), (1234.5, float("nan"), "1234"), (1e-14, float("nan"), "0.000"),
        (float("nan"), 0.1, "-"), (None, 0.1, "-"),
    ],
)  # fmt: skip
def test_digits_end_where_the_interval_begins(value, half, told):
    assert number(value, half) == told


@pytest.mark.parametrize(
    ("low", "high", "mean", "told"),
    [
        (0.7123, 0.8567, None, "[0.712, 0.857]"), (-2.01, 1.15, -0.43, "-0.4 [-2.0, +1.1]"),
        (0.005, 0.055, 0.03, "+0.030 [+0.005, +0.055]"), (float("nan"), 0.5, 0.0462, "+0.046"), (None, None, None, "-"),
    ],
)  # fmt: skip
def test_an_interval_decides_its_own_digits(low, high, mean, told):
    assert interval(low, high, mean) == told


def test_runs_that_leave_sites_out_are_no_seeds(tmp_path: Path) -> None:
    for site in ("A", "B"):
        place = tmp_path / "runs" / f"x-seed0-without-{site}" / "fairflare"
        place.mkdir(parents=True)
        (place / "results.json").write_text("{}")
        Unseen(site=site).write(place)
    with pytest.raises(ValueError, match=r"cannot be read: .*no schema_version"):
        read_material(tmp_path)


def _rules(css: str) -> dict[str, str]:
    """Return declarations by selector within ``@media print``."""
    block = css[css.index("@media print {") + len("@media print {") :]
    found: dict[str, str] = {}
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", block):
        for selector in selectors.split(","):
            found[selector.strip()] = found.get(selector.strip(), "") + body
    return found


def test_paper_has_what_the_words_mean_and_whole_rows():
    rules = _rules((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    assert "content-visibility: visible" in rules[".terms::details-content"]
    assert "display: none" not in rules.get("details", "")
    assert "break-inside: avoid" in rules["tr"]
    assert "table-header-group" in rules["thead"]
    assert "break-after: avoid" in rules["h2"]
    assert "break-after: avoid" in rules["caption"]
    for whole in ("td.n", "thead th"):  # 0.159 is not broken into 0.1 and 59
        assert "overflow-wrap: normal" in rules[whole]


def test_a_heading_stands_where_most_of_its_column_does() -> None:
    """Check that numbers and their headings are on the right, words on the left; a settings' column has both."""
    rows = [["a", 0.5, "auto", None], ["b", 0.25, 3, None], ["c", "not known", "adam", None], ["d", 0.125, None, None]]
    html = draw_and_render(
        Page("t", [], "", [], [Section("s", "S", parts=[Table("t", "", ["a", "p", "v", "n"], rows)])])
    )
    assert re.findall(r'<th scope="col"( class="n")?>', html) == ["", ' class="n"', "", ""]


@pytest.mark.parametrize(
    ("rows", "totals", "lines"),
    [
        ([], [], ["site  dice"]),
        ([], [["all", 0.5]], ["site   dice", "----  -----", "all   0.500"]),
        ([["A", 0.5]], [], ["site   dice", "----  -----", "A     0.500"]),
        ([["A", 0.5]], [["all", 0.5]], ["site   dice", "----  -----", "A     0.500", "----  -----", "all   0.500"]),
    ],
)
def test_a_rule_stands_above_lines_only(rows: list[list[Any]], totals: list[list[Any]], lines: list[str]) -> None:
    assert Table("run", "", ["site", "dice"], rows, totals=totals).text().splitlines() == lines
