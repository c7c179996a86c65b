"""Test that files that ``docs/privacy.md`` calls private cannot be read by other users of the machine."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairflare.base.disk.files import append, private_folder, write_whole
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare_lab.page.write import OFF
from tests.tiny import FUNDUS

SITES = ["site-1", "site-2"]
TINY = {**FUNDUS, "phantom_sites": 2}


@pytest.fixture
def umask() -> Iterator[None]:
    """Set the umask of most machines, with which others may read files."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.usefixtures("umask")
def test_what_is_appended_to_is_private_and_loses_what_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "new" / "log"
    append(log, b"one\n")
    append(log, b"ha")  # of a process that died
    append(log, b"two\n", 4, durable=False)
    append(log, b"three\n")
    assert log.read_bytes() == b"one\ntwo\nthree\n"
    assert open_to_others(log.parent) == []


def open_to_others(folder: Path) -> list[str]:
    """Return the paths in a folder, with the folder itself, that others may open."""
    wrong = [path for path in (folder, *folder.rglob("*")) if mode(path) != (0o700 if path.is_dir() else 0o600)]
    return [f"{mode(path):o} {path.relative_to(folder.parent)}" for path in wrong]


@pytest.mark.many
@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("method", "settings"),
    [("fed_lwr", {}), ("fed_mrl", {"mu_policy": "qmix"})],
)
def test_everything_that_a_run_keeps_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, settings: dict[str, Any]
) -> None:
    monkeypatch.delenv(OFF, raising=False)  # with the page
    for name in ("states", "checkpoints"):  # as an administrator makes them
        (tmp_path / name).mkdir()
    own = {"server": {"checkpoint_root": str(tmp_path / "checkpoints"), "models_in_memory": 0}}
    local = {"state_root": str(tmp_path / "states"), "sites": own}
    plan = make_plan(
        method, task="classification", sites=SITES, num_rounds=2, experiment="e", settings={**TINY, **settings},
        keep_local_models=True,
    )  # fmt: skip
    results = run_local(plan, tmp_path / "run", local)
    kept = [results, tmp_path / "states" / "e", tmp_path / "checkpoints" / "e"]
    found = {path.name.partition(".")[0] for folder in kept for path in folder.rglob("*")}
    assert {"results", "progress", "report", "local_model", "state-000002", "rounds"} <= found
    assert [line for folder in kept for line in open_to_others(folder)] == []
    models = [*results.parent.glob("*.pt")]
    assert len(models) == 2
    assert [mode(path) for path in models] == [0o600, 0o600]


@pytest.mark.usefixtures("umask")
def test_temporary_folders_are_private_while_sites_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a run without an experiment, in which the sites' models wait in a temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[list[str]] = []
    names: set[str] = set()

    class Looks:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: None

        def round_done(self, *given: Any) -> None:
            folders = [path for path in tmp_path.iterdir() if path.name.startswith("fairflare-")]
            names.update(path.name.partition(".")[0] for folder in folders for path in folder.rglob("*"))
            seen.append([line for folder in folders for line in open_to_others(folder)])

    plan = make_plan("fed_lwr", task="classification", sites=SITES, num_rounds=1, settings=TINY)
    run_local(plan, tmp_path / "run", listeners=[Looks()])  # type: ignore[list-item]
    assert "local_model" in names
    assert seen == [[]]


@pytest.mark.usefixtures("umask")
def test_a_folder_of_an_earlier_version_is_closed(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    private_folder(old)
    assert mode(old) == 0o700
    assert mode(tmp_path) != 0o777
    new = private_folder(tmp_path / "a" / "b")
    assert [mode(path) for path in (new, new.parent)] == [0o700, 0o700]


@pytest.mark.usefixtures("umask")
def test_a_file_is_never_open_not_even_while_it_is_written(tmp_path: Path) -> None:
    modes = []
    path = tmp_path / "model.pt"
    path.write_text("old")  # open to others
    write_whole(path, lambda partial: (partial.write_text("new"), modes.append(mode(partial))))
    assert (modes, mode(path), path.read_text()) == ([0o600], 0o600, "new")

    def another(partial: Path) -> None:  # as safetensors and others do
        other = tmp_path / "other"
        other.write_text("other")
        other.replace(partial)

    write_whole(path, another)
    assert (mode(path), path.read_text()) == (0o600, "other")


@pytest.mark.usefixtures("umask")
def test_what_is_made_to_be_handed_on_is_as_the_umask_says(tmp_path: Path) -> None:
    path = tmp_path / "shared.txt"
    write_whole(path, lambda partial: partial.write_text("x"), shared=True)
    assert mode(path) == 0o644


def test_a_folder_of_somebody_else_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: Path, wanted: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refused)
    private_folder(tmp_path)
    assert "cannot be made private (Operation not permitted)" in caplog.text
