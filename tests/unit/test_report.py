"""Test the page: self-contained, escaped, small, true to the intervals; and its files."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.exchange.messages import Message
from fairflare.federation.server.rounds import RoundFailed
from fairflare.reporting.layout import MAX_ROWS, Spread, print_cell
from fairflare.reporting.results import PAGE_FILE
from fairflare_lab.page import style, write
from fairflare_lab.page.write import write_report, write_run_page
from tests.federation.network import Run, misbehave
from tests.sections import upgraded
from tests.unit.report_runs import document, large, read, read_all, round_of, write_comparison, write_run

SITES = ("site-1", "site-2", "site-10")
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Read(HTMLParser):
    """Read a page as a browser does: every tag closed, text by element, tables as rows."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._table = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "caption":
            self._table = str(found["id"]).removeprefix("table-")
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("th", "td"):
            self.tables[self._table][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [str(value) for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("th", "td"):
            self.tables[self._table][-1][-1] += data
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))

    def headings(self) -> list[str]:
        return [str(a.get("id")) for tag, a in self.tags if tag == "h2"]


def page_of(folder: Path, **given: Any) -> Read:
    return Read(write_report(folder, folder / "report", **given).read_text(encoding="utf-8"))


def three(values: dict[str, list[float]], seeds: int = 2) -> list[dict[str, Any]]:
    """Return runs whose sites all have about ``value`` for each seed, without scatter by patients."""
    return [
        document(name, seed, at := {"site-1": of[seed], "site-2": of[seed] + 0.1}, rounds=1)
        | {"resampled": {site: [value] * 30 for site, value in at.items()}}
        for name, of in values.items()
        for seed in range(seeds)
    ]


# ------------------------------------------------------------------------------------------------ the page


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Read]:
    folder = large(tmp_path_factory.mktemp("large"))
    html = write_report(folder, folder / "report").read_text(encoding="utf-8")
    return folder / "report", html, Read(html)


@pytest.mark.long
def test_a_large_comparison_is_small_and_alone(big):
    """Check 8 methods x 6 sites x 3 seeds x 41 layers x 30 rounds."""
    _, html, read = big
    assert len(html.encode()) < 3_000_000
    assert not re.search(r"(?:https?:)?//", re.sub(r"data:image/png;base64,[A-Za-z0-9+/=\s]+", "", html))
    for tag, attributes in read.tags:
        assert tag not in ("script", "link", "iframe", "object", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href"):
                assert value is not None
                assert value.startswith(("#", "data:image/png;", "figures/", "tables/"))
    policy = [a["content"] for tag, a in read.tags if tag == "meta" and a.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert "@import" not in html
    assert re.search(r"<text[^>]*>site-6</text>", html), "letters are letters: they can be searched and read aloud"


@pytest.mark.long
def test_every_reader_finds_their_way(big):
    _, _, read = big
    kinds = [tag for tag, _ in read.tags]
    assert kinds.count("h1") == kinds.count("main") == kinds.count("nav") == 1
    assert ("html", {"lang": "en"}) in read.tags
    assert len(read.ids) == len(set(read.ids)), "an id stands there twice"
    targets = [a["href"] for tag, a in read.tags if tag == "a" and str(a.get("href")).startswith("#")]
    assert targets[0] == "#main"
    references = [str(t)[1:] for t in targets]
    for _, attributes in read.tags:
        references += str(attributes.get("aria-labelledby") or "").split()
        references += re.findall(r"url\(#([^)]*)\)", str(attributes))
        references += [v[1:] for k, v in attributes.items() if k == "href" and str(v).startswith("#") and v]
    assert set(references) <= set(read.ids)
    assert all(a.get("scope") in ("col", "row") for tag, a in read.tags if tag == "th")
    assert kinds.count("table") == kinds.count("caption") > 10
    assert kinds.count("figure") == kinds.count("figcaption") == kinds.count("svg")
    drawings = [a for _, a in read.tags if a.get("class") == "drawing"]
    assert len(drawings) == kinds.count("svg")
    assert all(a["role"] == "img" and a["aria-labelledby"] for a in drawings)
    assert all(a.get("tabindex") == "0" for _, a in read.tags if a.get("class") == "wide")


@pytest.mark.long
def test_sections_and_files_of_a_large_comparison(big):
    out, _, read = big
    assert read.headings() == [
        "summary", "results", "differences", "rounds", "layers", "site_weights", "reports", "settings",
    ]  # fmt: skip
    links = {str(a["href"]) for tag, a in read.tags if tag == "a" and not str(a["href"]).startswith("#")}
    files = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} - {"index.html"}
    assert links == files
    pictures = [ET.parse(path).getroot() for path in (out / "figures").iterdir()]
    for picture in pictures:
        assert picture.tag.endswith("svg")
        assert "SYNTHETIC" in "".join(picture.itertext())
    assert read.words.count("SYNTHETIC") >= len(pictures) + 3, "banner, data, notes, figures"
    assert read.words.count("SYNTHETIC") > 10


@pytest.mark.long
def test_tables_are_what_their_files_hold(big):
    out, _, read = big
    for name, rows in read.tables.items():
        lines = list(csv.reader(io.StringIO((out / "tables" / f"{name}.csv").read_text(encoding="utf-8"))))
        if name == "results":  # the page names the metric above the table
            lines = [[line[0], *line[2:]] for line in lines]
        if name.startswith("differences"):  # the page has mean and interval in one cell, and marks before verdicts
            lines = [[line[k] for k in (0, 2, 5, 9, 13)] for line in lines]
            rows = [[*row[:2], row[2].partition(" ")[0], row[3].lstrip("*! "), row[6]] for row in rows]
            lines[0][2], lines[0][4] = rows[0][2], rows[0][4]
        assert len(rows) == min(len(lines), MAX_ROWS + 1), name
        spread = [k for k, head in enumerate(lines[0]) if head.endswith(" sd")]
        heads = [head.removesuffix(" mean") for k, head in enumerate(lines[0]) if k not in spread]
        assert heads == rows[0]
        for line, row in zip(lines[1:], rows[1:], strict=False):
            cells = [cell for k, cell in enumerate(line) if k not in spread]
            deviations = {k - 1 - sum(j < k - 1 for j in spread): line[k] for k in spread}
            for k, (cell, text) in enumerate(zip(cells, row, strict=True)):
                assert _same(cell, deviations.get(k, ""), text), (name, k, cell, text)


def _same(cell: str, deviation: str, text: str) -> bool:
    try:
        value: float = float(cell)
    except ValueError:
        return text == cell or (not cell and text == "-")
    if text.startswith(("+", "-")) and text not in (cell, print_cell(value)):
        return abs(float(text) - value) <= 0.051  # a difference: its interval decides the decimals
    return text in (cell, print_cell(value), print_cell(Spread(value, float(deviation) if deviation else math.nan)))


@pytest.mark.long
def test_the_pages_own_csv_equals_what_compare_writes(tmp_path):
    """Compare two ways to the same figures: the page's and those of ``fairflare compare``."""
    from fairflare_lab.compare.comparison import compare

    runs = three({"a": [0.2, 0.4], "b": [0.25, 0.5]})
    folder = write_comparison(tmp_path / "c", runs)
    write_report(folder, tmp_path / "out")
    (line, *_), (ours, *_) = (
        list(csv.DictReader(io.StringIO(text)))
        for text in (compare(read_all(runs), style="csv"), (tmp_path / "out" / "tables" / "results.csv").read_text())
    )
    for name in ("average", "std", "worst"):
        assert float(ours[f"{name} mean"]) == pytest.approx(float(line[f"{name} mean"]), abs=1e-15)
        assert float(ours[f"{name} sd"]) == pytest.approx(float(line[f"{name} sd"]), abs=1e-15)


def test_colours_are_seen_by_light_and_by_dark():
    css = (Path(write.__file__).parent / "templates" / "page.css").read_text()
    papers = re.findall(r"--paper: (#[0-9a-f]{6})", css)
    assert len(papers) == 2
    for paper in papers:
        for colour in style.COLOURS:
            assert _contrast(colour, paper) >= 3, (colour, paper)
    for kind in ("ink", "muted", "link"):
        for colour, paper in zip(re.findall(rf"--{kind}: (#[0-9a-f]{{6}})", css), papers, strict=False):
            assert _contrast(colour, paper) >= 4.5, (kind, colour)
    looks = [style.look(k) for k in range(40)]
    assert len({(x.colour, x.dashes) for x in looks}) == 40
    assert len({(x.marker, x.dashes, x.hatch) for x in looks[:11]}) == 11, "told apart without colour"


def _contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


# ------------------------------------------------------------------------------------------------ words


def test_words_are_true_to_the_intervals(tmp_path, quick_pictures):
    """Check three seeds: b gains 0.1 each time, c gains once and loses once, d loses 0.2 each time."""
    base = [0.30, 0.40, 0.50]
    runs = three({"a": base, "b": [0.40, 0.501, 0.60], "c": [0.40, 0.30, 0.50], "d": [0.10, 0.201, 0.30]}, seeds=3)
    read = page_of(write_comparison(tmp_path, runs))
    # b: differences 0.1, 0.101, 0.1: mean 0.10033, sd 0.00057735, half 4.30265 * 0.00057735 / sqrt(3) = 0.001434.
    found = {tuple(row[:2]): row for row in read.tables["differences"][1:]}
    assert {label: found[label, "average"][2] for label in "bd"} == {
        "b": "+0.100 [+0.099, +0.102]", "d": "-0.200 [-0.201, -0.198]",
    }  # fmt: skip
    # c: sd 0.1, and among nine tests 0.05 / 9: (13.3604 + 1.0607) * 0.1 / sqrt(3) is more than any of the figures.
    verdicts = {label: found[label, "average"][3] for label in "bcd"}
    assert verdicts == {"b": "* better", "c": "cannot tell", "d": "! worse"}
    assert found["b", "worst"][3] == "* better"
    for label in "bcd":  # 0 everywhere is no gain, and shows nothing of what could have been seen
        assert [found[label, "std"][k] for k in (3, 6)] == ["not known", "-"]


def test_the_reference_is_the_comparisons_or_the_one_that_is_asked_for(tmp_path, quick_pictures):
    folder = write_comparison(tmp_path, three({"a": [0.3, 0.4], "b": [0.3, 0.5], "c": [0.2, 0.2]}))
    (folder / "table.csv").write_text("method,metric,runs\nc,dice,2\nb,dice,2\na,dice,2\n")
    (folder / "differences.csv").write_text("method,reference\na,b\nc,b\n")
    read = page_of(folder)
    assert [row[0] for row in read.tables["results"][1:]] == ["c", "b", "a"]
    assert "Differences to b, paired" in read.words
    assert "Differences to a, paired" in page_of(folder, reference="a", overwrite=True).words
    with pytest.raises(ValueError, match="--reference"):
        write_report(folder, folder / "other", reference="x")


# ------------------------------------------------------------------------------------------------ what is there


@pytest.fixture
def quick_pictures(monkeypatch):
    """Replace the drawing of figures, which takes seconds, in tests of other parts."""
    monkeypatch.setattr(write, "draw_forms", lambda name, draw: style.Drawn("<svg></svg>", "<svg/>"))


def one(**more: Any) -> dict[str, Any]:
    return document("fed_x", 0, dict.fromkeys(SITES, 0.5), **more)


def test_sections_of_a_plain_run(tmp_path, quick_pictures):
    read = page_of(write_run(tmp_path, one()))
    assert read.headings() == [
        "summary", "results", "rounds", "site_weights", "settings",
    ]  # fmt: skip
    assert "which cannot say how much of it is luck of the seed" in read.words
    assert "No site was left out of a round." in read.words


@pytest.mark.many
@pytest.mark.parametrize(
    ("section", "more"),
    [
        ("layers", {"layers": {"conv": {s: {"weight": 0.4, "dissimilarity": 0.1} for s in SITES}}}),
        ("reports", {"reports": {s: {"rescue_factor": 0.1 * k} for k, s in enumerate(SITES)}}),
        ("reports", {"reports": {s: {"sharpness": 0.2} for s in SITES}}),
        ("reports", {"reports": {s: {"mu": 1e-3} for s in SITES}}),
        ("reports", {"reports": {s: {"own_field": 1} for s in SITES}}),
    ],
)
def test_a_section_where_there_is_something(tmp_path, section, more, monkeypatch):
    """Check also that sections are drawn."""
    monkeypatch.delenv(write.OFF)
    run = one()
    run["rounds"] = [round_of(n, SITES, dict.fromkeys(SITES, 0.5), **more) for n in range(2)]
    lines = write_run_page(read(**run), tmp_path)
    assert re.fullmatch(r"page: .*report\.html \(\d+\.\d s\)", lines[0]), lines
    page = Read((tmp_path / PAGE_FILE).read_text(encoding="utf-8"))
    assert section in page.headings()
    assert not any(str(a.get("href")).startswith(("figures/", "tables/")) for tag, a in page.tags if tag == "a")


def test_similarity_scatters_over_the_seeds(tmp_path, quick_pictures):
    runs = three({"fed_lwr": [0.5, 0.6]})
    for apart, run in zip((0.1, 0.3), runs, strict=True):
        of_layer = {site: {"weight": 0.5, "dissimilarity": apart} for site in ("site-1", "site-2")}
        run["rounds"][0]["layers"] = {"first": of_layer, "last": of_layer}
    page_of(write_comparison(tmp_path, runs))
    with (tmp_path / "report" / "tables" / "similarity.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(float(row["1 - similarity mean"]), float(row["1 - similarity sd"])) for row in rows] == [
        pytest.approx((0.2, 0.1))
    ] * 2


def test_who_took_part(tmp_path):
    run = one()
    run["rounds"][1].update(
        accepted=["site-1"], sites=["site-1", "site-2"],
        left_out=[{"site": "site-2", "phase": "train", "reason": "loss is nan"}],
    )  # fmt: skip
    read = page_of(write_run(tmp_path, run))
    assert "Took part in rounds: site-1 2/2, site-2 1/2, site-10 1/2." in read.words
    assert "site-2 in round 1, train: loss is nan" in read.words


# ------------------------------------------------------------------------------------------------ hostile, damaged

BAD = "<script>alert(1)</script>\"'&$\\frac{$#\u202e\x1b[31m" + "x" * 300


@pytest.mark.long
def test_names_are_text_and_nothing_else(tmp_path):
    run = document(BAD, 0, {BAD: 0.5, "_hidden": 0.4, "{{ 7 * 7 }}": 0.3})
    run["rounds"][1]["left_out"] = [{"site": BAD, "phase": BAD, "reason": BAD}]
    run["rounds"][1]["accepted"] = ["_hidden"]
    run["rounds"][1]["warnings"] = [{"site": BAD, "kind": BAD, "value": 1.0, "used": 1.0, "text": BAD}]
    run["rounds"][1]["reports"] = {BAD: {"mu": 1.0, BAD: 2.0}}
    run["rounds"][1]["layers"] = {BAD: {BAD: {"weight": 0.5, "dissimilarity": 0.1}}}
    run["rounds"][1]["phases"][0]["name"] = BAD
    run["info"]["versions"] = {BAD: BAD}
    run["info"]["config"]["rule"]["args"] = {BAD: BAD, "deep": {"list": [BAD]}}
    run["info"]["said"] = {BAD: {"images": {BAD: BAD}, "device": BAD}}
    html = write_report(write_run(tmp_path, run), tmp_path / "report").read_text(encoding="utf-8")
    read = Read(html)
    assert "<script" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "{{ 7 * 7 }}" in read.words
    assert "<script>alert(1)</script>" in read.words, "it is there, as text"
    for path in (tmp_path / "report").rglob("*.svg"):
        ET.parse(path)
        assert "<script" not in path.read_text(encoding="utf-8")


def test_numbers_that_are_none(tmp_path):
    text = json.dumps(upgraded(one()))
    text = text.replace('"value": 0.5', '"value": NaN', 1)
    read = page_of(write_run(tmp_path, text))
    assert "nan" not in read.words.lower().split()
    assert "Average and spread of Dice are over 2 of 3 sites, without site-1 (undefined there)." in read.words
    assert read.tables["sites"][1][:2] == ["site-1", "-"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a results file"),
        ("[1]", "not a results file"),
        ("[" * 100_000, "not a results file"),
        ('{"schema_version": 99, "status": "completed"}', "schema version 99"),
        (b"\xff\xfe", "not a results file"),
        (json.dumps(document("a", 0, {"s": 0.5})).replace("1.5", "1e999"), "rounds[0].phases[0].seconds is no number"),
        (json.dumps(document("a", 0, {"s": 0.5})).replace("0.4", "1" * 5000), "not a results file"),
        (json.dumps(document("a", 0, {"s": 0.5})).replace("0.4", "1" * 400), "a whole number of 400 digits"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, text, told):
    write_run(tmp_path / "run", "")
    path = next(tmp_path.rglob("results.json"))
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert told in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "run" / "report").exists()


def test_one_unreadable_run_does_not_hide_the_others(tmp_path, quick_pictures):
    folder = write_comparison(tmp_path, three({"a": [0.3, 0.4], "b": [0.3, 0.5]}))
    broken = folder / "runs" / "b-seed1"
    next(broken.rglob("results.json")).write_text("{")
    read = page_of(folder)
    assert "left out, since it cannot be read" in read.words
    assert "Runs 3" in read.words


def test_runs_that_did_not_complete_are_named(tmp_path, quick_pictures):
    runs = three({"a": [0.3, 0.4], "b": [0.3, 0.5]})
    runs[-1].update(status="failed", reason="no disk", test=None)
    read = page_of(write_comparison(tmp_path, runs))
    assert "1 of 4 runs did not complete and are left out:" in read.words
    assert ["b", "1", "failed"] in [row[:3] for row in read.tables["runs"]]


# ------------------------------------------------------------------------------------------------ command, server


def test_the_command(tmp_path, quick_pictures, monkeypatch):
    folder = write_run(tmp_path / "run", one())
    runner = CliRunner()
    done = runner.invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert "report/index.html" in done.output.replace("\n", "")
    again = runner.invoke(app, ["report", str(folder)])
    assert again.exit_code == 2
    assert "--overwrite" in again.output
    stale = folder / "report" / "tables" / "old.csv"
    own = folder / "report" / "tables" / "mine.txt"
    stale.write_text("x")
    own.write_text("x")
    assert runner.invoke(app, ["report", str(folder), "--overwrite"]).exit_code == 0
    assert not stale.exists()
    assert own.exists(), "what no report writes is not touched"
    assert runner.invoke(app, ["report", str(folder), "-m", "auc", "--out", str(tmp_path / "b")]).exit_code == 2
    assert runner.invoke(app, ["report", str(folder), "--reference", "a", "--out", str(tmp_path / "b")]).exit_code == 2
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG")  # a file is no run, whatever is in it
    for place in ("nowhere", "pictures"):
        missing = runner.invoke(app, ["report", str(tmp_path / place)])
        assert missing.exit_code == 2
        assert "no results.json there" in missing.output
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    full = runner.invoke(app, ["report", str(folder), "--out", str(tmp_path / "c")])
    assert full.exit_code == 2
    assert "No space left on device" in full.output


def full_disk(path: Path, data: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_a_folder_that_is_no_report_is_left_alone(tmp_path, quick_pictures):
    folder = write_run(tmp_path / "run", one())
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "index.html").write_text("<html>mine</html>")
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "home"), "--overwrite"])
    assert done.exit_code == 2
    assert "no report and not empty" in done.output
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["index.html"]
    (tmp_path / "file").write_text("")
    assert CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "file")]).exit_code == 2


def test_a_download_and_a_folder_of_runs(tmp_path, quick_pictures):
    place = tmp_path / "download" / "workspace" / "fairflare"
    place.mkdir(parents=True)
    (place / "results.json").write_text(json.dumps(one()))
    assert "Method fed_x" in page_of(tmp_path / "download").words
    assert "Method fed_x" in Read(write_report(place / "results.json", tmp_path / "o").read_text()).words
    for name, value in (("a", 0.3), ("b", 0.4)):
        write_run(tmp_path / "runs_here" / name, document(name, 0, dict.fromkeys(SITES, value)))
    assert "Comparison of 2 methods" in page_of(tmp_path / "runs_here").words


def test_the_server_writes_the_page_of_a_run(tmp_path, monkeypatch):
    monkeypatch.delenv(write.OFF)
    run = Run(tmp_path, num_rounds=2)()
    path = run.folder / "fairflare" / PAGE_FILE
    assert any(re.fullmatch(rf"page: {re.escape(str(path))} \(\d+\.\d s\)", line) for line in run.net.said)
    read = Read(path.read_text(encoding="utf-8"))
    assert "FedAvg (fed_avg)" in read.words
    assert read.tables["sites"][1:4] == [["site-1", "0.200"], ["site-2", "0.400"], ["site-3", "0.600"]]
    assert [p.name for p in path.parent.iterdir() if "partial" in p.name] == []


def test_the_page_of_an_earlier_run_goes(tmp_path):
    (tmp_path / "run" / "fairflare").mkdir(parents=True)
    page = tmp_path / "run" / "fairflare" / PAGE_FILE
    page.write_text("of an earlier run")
    run = Run(tmp_path, misbehave("site-1", "train", Message(meta={})), num_rounds=1, min_sites=3)
    with pytest.raises(RoundFailed):
        run()
    assert not page.exists()


def test_a_page_never_costs_the_run(tmp_path, monkeypatch):
    monkeypatch.delenv(write.OFF)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no ink")

    monkeypatch.setattr(write, "draw_forms", broken)
    run = Run(tmp_path, num_rounds=1)()
    assert any("the page could not be made: MemoryError: no ink" in line for line in run.net.said)
    assert run.results["status"] == "completed"
    assert not (run.folder / "fairflare" / PAGE_FILE).exists()


def test_the_page_of_a_run_can_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv(write.OFF, "0")
    assert write_run_page(read(**one()), tmp_path) == []
    assert list(tmp_path.iterdir()) == []
