"""Test the public model zoo's bundles on sites without code rights, as ``tests/zoo.txt`` says of each."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.zoo import CASES, COMMIT, REFUSED, TABLE, row, rows

pytestmark = pytest.mark.usefixtures("one_thread")
HEAD, _, *LINES = TABLE.read_text(encoding="utf-8").splitlines()
KNOWN = {line.partition(" ")[0]: line for line in LINES}


def test_the_table_has_what_a_sealed_site_takes() -> None:
    assert COMMIT in HEAD
    assert len(KNOWN) == 27
    assert {name for name, line in KNOWN.items() if " | yes | 3 losses equal | " in line} == {*CASES}
    assert len(CASES) >= 12
    for name in REFUSED:
        assert re.search(r" \| no \| .*\bkey ('|for )", KNOWN[name])
    own = {*KNOWN} - {*CASES, *REFUSED}
    assert len(own) == 11
    for name in own:
        assert " | no | Python of its own: keys " in KNOWN[name]


def test_the_table_is_of_all_bundles_that_train(model_zoo: Path) -> None:
    assert rows(model_zoo) == sorted(KNOWN)


@pytest.mark.long
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.filterwarnings("ignore")
def test_a_bundle_is_as_the_table_says(model_zoo: Path, name: str) -> None:
    for package in CASES[name].needs if name in CASES else ():
        if find_spec(package) is None:
            pytest.skip(f"MONAI's parser needs {package} for {name}")
    assert without_losses(row(model_zoo, name)) == without_losses(KNOWN[name])


def without_losses(line: str) -> str:
    """Leave the losses themselves out, which depend on the processor; that both readers give the same ones does not."""
    return line.rpartition(" | ")[0] if " | yes | " in line else line
