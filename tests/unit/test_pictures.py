"""Pictures of a run: there, where there is something to draw and matplotlib; never a reason to fail."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fairflare.core.fairness import summarize
from fairflare.reporting import pictures
from fairflare.reporting.documents import Results
from fairflare.reporting.pictures import RED, draw_map, draw_mu, draw_pictures, draw_sites
from tests.unit.report_runs import read


def results(sites: list[str], rounds: int = 3, **details: Any) -> Results:
    som = {
        "u_matrix": [[0.0, 1.0], [2.0, 3.0]],
        "bmu": {site: [k % 2, 1] for k, site in enumerate(sites)},
        "sigma": 2.0,
    }
    return read(
        info={"label": "fed_mrl", "synthetic": True},
        rounds=[
            {
                "current_round": r,
                "reports": {site: {"mu": 0.1 * k} for k, site in enumerate(sites) if (k + r) % 5},
                "details": {"som": som} if r < rounds - 1 else details,
            }
            for r in range(rounds)
        ],
    )


def texts(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize(
    ("sites", "rounds"), [(["a"], 1), (["site-1", "site-2"], 2), ([f"s-{k}" for k in range(30)], 80)]
)
def test_files_are_there(tmp_path, sites, rounds):
    found = results(sites, rounds + 1)
    lines = draw_pictures(found, tmp_path)
    assert lines == [f"picture: {tmp_path / 'som_map.png'}", f"picture: {tmp_path / 'mu.png'}"]
    for name in ("som_map.png", "mu.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_sites_are_named_where_they_sit():
    pytest.importorskip("matplotlib")
    som = {
        "u_matrix": [[1.0, 1.0]] * 2,
        "bmu": {f"site-{k}": [0, 1] for k in range(2, 12)} | {"x": [1, 0]},
        "sigma": 1.0,
    }
    figure = draw_map(som, title="t")
    assert texts(figure) == ["site-2\nsite-3\nsite-4\nand 7 more", "x"]
    assert [text.get_position() for text in figure.axes[0].texts] == [(1, 0), (0, 1)]
    assert texts(draw_map({**som, "bmu": {"university-hospital-12": [0, 0]}})) == ["univers…ital-12"]


def test_mu_by_site_and_round():
    figure = draw_mu({"site-10": [1e-5, None, 0.4], "site-2": [1e-5, 1.0, 0.0]}, title="t")
    axes, bar = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["site-2", "site-10"]
    assert texts(figure) == ["1e-05", "1", "0", "1e-05", "0.4"]
    assert "blank: not in the round" in axes.get_title()
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "1e-05", "0.4", "1"]


def test_nothing_to_draw(tmp_path):
    assert draw_pictures(read(rounds=[]), tmp_path) == []
    round_of_a_loss = {"current_round": 0, "reports": {"a": {"loss": 1.0}}, "details": {}}
    assert draw_pictures(read(rounds=[round_of_a_loss]), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_one_line(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (line,) = draw_pictures(results(["a", "b"]), tmp_path)
    assert "matplotlib is not installed" in line
    assert "fairflare[page]" in line
    assert list(tmp_path.iterdir()) == []


def test_a_picture_never_costs_the_run(tmp_path, monkeypatch):
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr(pictures, "draw_mu", broken)
    lines = draw_pictures(results(["a", "b"]), tmp_path)
    assert lines[-1] == "a picture could not be drawn: ValueError: no ink"
    (line,) = draw_pictures(results(["a", "b"]), tmp_path / "missing")
    assert "could not be drawn" in line


def finished(scores: dict[str, float | None]) -> Results:
    told = {site: score for site, score in scores.items() if score is not None}
    summary = summarize(told)
    rounds = [{"current_round": r, "validation": {s: {"dice": v * r} for s, v in told.items()}} for r in range(3)]
    del rounds[1]["validation"][min(told)]
    return read(
        info={"label": "fed_lwr", "primary_metric": "dice", "synthetic": True},
        rounds=rounds,
        test={site: {"dice": score, "loss": 1.0} for site, score in scores.items()},
        fairness={"dice": summary},
    )


def test_what_every_site_gets() -> None:
    pytest.importorskip("matplotlib")
    scores = {"site-1": 0.9, "site-2": 0.4, "site-10": 0.7, "site-3": None}
    figure = draw_sites(finished(scores))
    rounds, final = figure.axes
    assert [label.get_text() for label in final.get_yticklabels()] == ["site-2", "site-10", "site-1"]
    (dots,) = final.collections
    assert dots.get_offsets()[:, 0].tolist() == [0.4, 0.7, 0.9]
    red = [line for line in rounds.lines if line.get_color() == RED]
    assert [line.get_ydata().tolist() for line in red] == [[0.0, 0.4, 0.8]]
    assert len(rounds.lines) == 4
    assert final.get_title() == "final test: 0.667, std 0.205, worst 0.400 (red)"
    assert "SYNTHETIC" in figure.get_suptitle()


def test_a_run_without_a_test_has_no_picture_of_it() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="the final test has no 'dice'; it has nothing: the run did not complete"):
        draw_sites(read(info={"primary_metric": "dice"}))
    with pytest.raises(ValueError, match="has no 'auc'; it has dice"):
        draw_sites(finished({"a": 0.5}), "auc")
