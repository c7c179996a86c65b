"""Test a site's privacy ledger: it counts every round before it begins, and refuses what it cannot trust."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fairflare.privacy import ledger
from fairflare.privacy.ledger import BudgetRefused, Cost, Ledger, Spending

OF = {"job": "j", "experiment": "e", "round": 0}
EACH = 0.5  # epsilon of a step of the accountant below


def counted(history: Iterable[Cost], *_: float) -> tuple[float, str]:
    return sum(EACH * steps for _, _, steps in history), "sum"


@pytest.fixture(autouse=True)
def by_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count by a plain sum, which needs no opacus and no time; a test of opacus undoes it."""
    monkeypatch.setattr(ledger, "epsilon", counted)


def spending(steps: int = 2, target: float = 4.0) -> Spending:
    return Spending("train", "patient", 9, 1.0, 0.5, steps, 1.0, target, 1e-5)


def reserve(root: Path, cases: str = "abc", steps: int = 2, target: float = 4.0) -> float:
    return Ledger("site-1", root).reserve(cases, spending(steps, target), OF)


def lines(root: Path) -> list[dict[str, Any]]:
    text = (root / ledger.BOOKS / "site-1" / ledger.LEDGER).read_text()
    return [json.loads(line) for line in text.splitlines()]


def files(root: Path) -> tuple[Path, Path, Path]:
    book = root / ledger.BOOKS / "site-1"
    return book / ledger.LEDGER, book / ledger.SECRET, root / ledger.HEADS / "site-1.json"


# ------------------------------------------------------------------------------------------------ budgets


def test_rounds_add_up_over_jobs_until_the_budget_is_spent(tmp_path: Path) -> None:
    assert [reserve(tmp_path) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(BudgetRefused, match=r"spent: .*epsilon is 5\.0000, .* 4 "):
        reserve(tmp_path)
    assert reserve(tmp_path, target=5.0) == 5.0  # the site's own file raised it
    with pytest.raises(BudgetRefused, match="budget spent"):
        reserve(tmp_path, steps=0, target=4.0)  # a lower target holds at once
    assert [line["epsilon_after"] for line in lines(tmp_path)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [line["seq"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_how_many_rounds_the_budget_lasts_for_is_known_before_the_first(tmp_path: Path) -> None:
    book = Ledger("site-1", tmp_path)
    assert [book.lasts("abc", spending(), most) for most in (0, 3, 4, 100)] == [0, 3, 4, 4]
    why = r"one round: .* is 1\.0000, .* 0\.9 .*helps"
    with pytest.raises(BudgetRefused, match=why):
        book.lasts("abc", spending(target=0.9), 5)
    assert not [*tmp_path.rglob(ledger.LEDGER)]  # nothing was reserved
    reserve(tmp_path)
    assert book.lasts("cxy", spending(), 100) == 3
    assert book.lasts("mno", spending(), 100) == 4  # no case in common
    with pytest.raises(BudgetRefused, match=r"spent: .*epsilon is 2\.0000, .* 1 "):
        book.lasts("abc", spending(target=1.0), 5)
    assert book.lasts("abc", spending(target=1.0), 0) == 0  # no training is asked for
    files(tmp_path)[0].unlink()
    with pytest.raises(BudgetRefused, match=r"'ledger.jsonl' of its ledger is gone"):
        book.lasts("abc", spending(), 5)


@pytest.mark.many(1)
@pytest.mark.parametrize("target", [2.6, 3.0, 4.5])
def test_the_rough_count_of_rounds_is_that_of_the_ledger(
    target: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    pytest.importorskip("opacus", reason="opacus is not installed: make test-dp")
    one = Spending("train", "patient", 200, 1.0, 1 / 13, 13, 1.0, target, 1e-5)
    found = Ledger("site-1", tmp_path).lasts("abc", one, 20)
    fits = [ledger.epsilon([(1.0, 1 / 13, 13)] * n, 1e-5)[0] <= target for n in (found, found + 1)]
    assert fits == [True, False]


@pytest.mark.parametrize(
    ("past", "target", "steps", "others"),
    [
        (0, 2.0, 4, ["more noise", "fewer local_epochs"]),
        (0, 0.5, 4, ["more noise"]),  # ten times the noise: 0.4; one step: 1
        (0, 2.0, 200, ["fewer local_epochs"]),
        (1, 4.0, 4, []),  # the budget is gone whatever the round costs
    ],
)
def test_a_refused_round_names_only_what_helps(
    past: int, target: float, steps: int, others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count a step as epsilon 1 / noise, then do what the refusal advises."""
    monkeypatch.setattr(ledger, "epsilon", lambda history, *_: (sum(n / z for z, _, n in history), "sum"))
    changed = {"more noise": (10.0, steps), "fewer local_epochs": (1.0, 1)}

    def ask(noise: float, steps: int, target: float = target) -> float:
        of = Spending("train", "patient", 9, noise, 0.5, steps, 1.0, target, 1e-5)
        return Ledger("site-1", tmp_path).reserve("abc", of, OF)

    for _ in range(past):
        ask(1.0, 4)
    with pytest.raises(BudgetRefused, match="what helps: a larger 'epsilon'") as refused:
        ask(1.0, steps)
    assert [name for name in changed if name in str(refused.value)] == others
    for name, (noise, fewer) in changed.items():
        if name not in others:
            with pytest.raises(BudgetRefused):
                ask(noise, fewer)
    ask(*changed[others[0]]) if others else ask(1.0, steps, target=100.0)


def test_what_lasts_can_be_asked_without_making_a_ledger(tmp_path: Path) -> None:
    book = Ledger("site-1", tmp_path)
    assert book.lasts("abc", spending(), 1, begins=False) == 1
    assert [*tmp_path.iterdir()] == []
    reserve(tmp_path)
    files(tmp_path)[0].unlink()
    with pytest.raises(BudgetRefused, match=r"'ledger.jsonl' of its ledger is gone"):
        book.lasts("abc", spending(), 1, begins=False)


def test_a_list_that_shares_one_case_goes_on_with_what_was_spent(tmp_path: Path) -> None:
    assert reserve(tmp_path, "abc") == 1.0
    assert reserve(tmp_path, "cxy") == 2.0
    assert reserve(tmp_path, "mno") == 1.0  # no case in common
    assert reserve(tmp_path, "abcd") == 3.0  # one image more is no new budget
    assert reserve(tmp_path, "yz") == 2.0
    assert reserve(tmp_path, "am") == 4.0  # of both lists


def test_no_name_of_a_case_stands_in_the_files_and_only_the_owner_reads_them(tmp_path: Path) -> None:
    Ledger("site-1", tmp_path).reserve(["patient-Zoe"], spending(), OF)
    found = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert len(found) == 4
    for path in found:
        assert b"Zoe" not in path.read_bytes()  # no digits: a checksum may have any four
        assert path.stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------------------------------ what is refused


def changed(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def moved(path: Path) -> None:
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([second, first, *rest]))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda book, secret, head: changed(book, b'"steps": 2', b'"steps": 1'), "line 1 of its ledger is damaged"),
        (lambda book, secret, head: changed(book, b'"z": 1.0', b'"z": 1.0 '), "line 1 of its ledger is damaged"),
        (lambda book, secret, head: moved(book), "line 1 of its ledger is damaged, moved"),
        (
            lambda book, secret, head: book.write_bytes(b"".join(book.read_bytes().splitlines(keepends=True)[1:])),
            "line 1 of its ledger is damaged",
        ),
        (
            lambda book, secret, head: book.write_bytes(b"".join(book.read_bytes().splitlines(keepends=True)[:-1])),
            "has 2 lines, .* knows of 3: .*an older",
        ),
        (lambda book, secret, head: book.write_bytes(b""), "ledger has 0 lines, .* knows of 3"),
        (lambda book, secret, head: book.unlink(), "'ledger.jsonl' of its ledger is gone"),
        (lambda book, secret, head: secret.unlink(), "'secret' of its ledger is gone"),
        (lambda book, secret, head: secret.write_bytes(bytes(32)), "line 1 of its ledger is damaged"),
        (lambda book, secret, head: head.unlink(), "the head of its ledger is gone"),
        (lambda book, secret, head: head.write_text("{}"), "the head of its ledger is damaged"),
        (lambda book, secret, head: head.write_text('{"seq": 1, "hash": ""}'), "do not belong together"),
        (lambda book, secret, head: changed(head, b'"seq": 3', b'"seq": 2'), "do not belong together"),
        (lambda book, secret, head: next((book.parent / "lists").iterdir()).unlink(), "a list of cases of its ledger"),
        (
            lambda book, secret, head: next((book.parent / "lists").iterdir()).write_bytes(bytes(96)),
            "a list of cases of its ledger is damaged",
        ),
        (lambda book, secret, head: book.parent.rename(book.parent.with_name("away")), "is gone"),
    ],
)
def test_a_ledger_that_is_not_as_it_was_written_is_refused(tmp_path: Path, harm: Any, why: str) -> None:
    for _ in range(3):
        reserve(tmp_path)
    harm(*files(tmp_path))
    with pytest.raises(BudgetRefused, match=why) as refused:
        reserve(tmp_path)
    assert "nothing is trained" in refused.value.public
    assert refused.value.skipped


def test_an_older_copy_of_the_file_is_noticed_and_one_of_both_is_not(tmp_path: Path) -> None:
    book, _, head = files(tmp_path)
    reserve(tmp_path)
    old, old_head = book.read_bytes(), head.read_bytes()
    reserve(tmp_path)
    book.write_bytes(old)
    with pytest.raises(BudgetRefused, match="an older one"):
        reserve(tmp_path)
    head.write_bytes(old_head)
    assert reserve(tmp_path) == 2.0  # the page says so: nothing at the site can tell


def test_an_older_copy_of_both_files_is_noticed_if_a_server_shows_a_later_line(tmp_path: Path) -> None:
    """Check a server that shows any line of the ledger, one that knows more than the ledger, and lies."""
    book, _, head = files(tmp_path)
    here, hashes, copies = Ledger("site-1", tmp_path), list[str](), []
    for _ in range(2):
        here.reserve("abc", spending(), OF)
        copies.append((book.read_bytes(), head.read_bytes()))
        hashes.append(hashlib.sha256(book.read_bytes().splitlines(keepends=True)[-1]).hexdigest())
        assert here.last == hashes[-1]
    for here.shown in (None, *hashes):  # a server that missed an answer shows an earlier line
        here.lasts("abc", spending(), 0)
    (old, old_head), _ = copies
    book.write_bytes(old)
    head.write_bytes(old_head)
    here.shown = hashes[0]
    here.lasts("abc", spending(), 0)
    for here.shown in (hashes[1], "", 5, ["x"], "0" * 64):
        for ask in (lambda: here.lasts("abc", spending(), 0), lambda: here.reserve("abc", spending(), OF)):
            with pytest.raises(BudgetRefused, match=r"lacks the line .*: it is an older one"):
                ask()
    assert book.read_bytes() == old
    book.parent.rename(tmp_path / "away")
    head.unlink()
    here.shown = hashes[1]
    for ask in (lambda: here.lasts("abc", spending(), 0), lambda: here.reserve("abc", spending(), OF)):
        with pytest.raises(BudgetRefused, match=r"'ledger\.jsonl' of its ledger is gone"):
            ask()
    here.shown = None
    assert here.reserve("abc", spending(), OF) == 1.0  # a server that shows nothing: as if there had been none


# ------------------------------------------------------------------------------------------------ crashes


def test_a_line_that_a_crash_has_cut_at_any_byte_is_left_out(tmp_path: Path) -> None:
    """Check every length of a half-written third line: no step was made for it, so it does not count."""
    for _ in range(2):
        reserve(tmp_path)
    book, _, head = files(tmp_path)
    before, told = book.read_bytes(), head.read_bytes()
    reserve(tmp_path)
    third = book.read_bytes().removeprefix(before)
    for length in range(0, len(third), 7):
        book.write_bytes(before + third[:length])
        head.write_bytes(told)
        assert reserve(tmp_path) == 3.0
        assert len(lines(tmp_path)) == 3


def test_a_crash_between_line_and_head_counts_the_line(tmp_path: Path) -> None:
    for _ in range(2):
        reserve(tmp_path)
    _, _, head = files(tmp_path)
    told = head.read_bytes()
    reserve(tmp_path)
    head.write_bytes(told)
    assert reserve(tmp_path) == 4.0


def test_a_full_disk_leaves_a_ledger_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "no space")))
        with pytest.raises(BudgetRefused, match=r"its ledger .*: no space"):
            reserve(tmp_path)
    assert reserve(tmp_path) in (2.0, 3.0)  # the line may be on disk, and counts then


KILLED = """
import os, sys, pathlib
from fairflare.privacy import ledger
ledger.epsilon = lambda history, *_: (sum(c[2] for c in history) * 0.001, "sum")
root, done = pathlib.Path(sys.argv[1]), open(sys.argv[2], "a")
for _ in sys.stdin:  # a child for each line, which is killed: one import for all
    if not (child := os.fork()):
        break
    os.waitpid(child, 0)
    print("killed", flush=True)
else:
    sys.exit()
print(os.getpid(), flush=True)
while True:
    after = ledger.Ledger("site-1", root).reserve(sys.argv[3], ledger.Spending(
        "train", "patient", 9, 1.0, 0.5, 1, 1.0, 1e9, 1e-5), {})
    done.write(f"{after:.3f}\\n")
    done.flush()
"""


@pytest.mark.many
@pytest.mark.parametrize("seed", range(2))
def test_a_ledger_outlives_kill_9_at_any_moment(tmp_path: Path, seed: int) -> None:
    """Check that after each kill all rounds that were allowed are counted, and at most one that was not yet."""
    root, done = tmp_path / "root", tmp_path / "done"
    arguments = [sys.executable, "-c", KILLED, str(root), str(done), "abc"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        for kills, wait in enumerate((0.0, 0.003, 0.011, 0.05), 1):
            process.stdin.write("another\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            time.sleep(wait * (1 + seed / 3))
            os.kill(child, signal.SIGKILL)
            assert process.stdout.readline() == "killed\n"
            allowed = len(done.read_text().splitlines())
            after = Ledger("site-1", root).reserve("abc", spending(1, 1e9), OF)
            with done.open("a") as file:
                file.write(f"{after:.3f}\n")
            # Each kill: at most one line whose round did not begin.
            assert allowed < after / EACH <= allowed + 1 + kills
    assert len(lines(root)) == after / EACH


# ------------------------------------------------------------------------------------------------ the accountant

#: Setting: z, 1 / q, steps, delta, epsilon by RDP and by PRV; from the specification, entered by hand.
TABLE = (
    (1.0, 7, 140, 1e-3, 10.0583, 8.7521),
    (1.0, 13, 260, 1e-3, 7.0081, 6.0653),
    (1.0, 13, 1300, 1e-3, 18.5232, 16.6481),
    (1.69, 13, 1300, 1e-3, 7.4549, 6.6523),
    (1.0, 16, 800, 1e-4, 12.1837, 11.0192),
    (1.0, 32, 1600, 1e-4, 7.9981, 7.2189),
    (1.2, 32, 6400, 1e-4, 13.0018, 11.9350),
    (1.0, 125, 2500, 1e-4, 2.1508, 1.9072),
    (0.8, 79, 7900, 1e-5, 12.6084, 11.5995),
    (0.7, 157, 15700, 1e-5, 11.9660, 10.9497),
)


@pytest.mark.many(1)
@pytest.mark.parametrize(("z", "each", "steps", "delta", "rdp", "prv"), TABLE)
def test_ten_settings_to_four_digits(
    z: float, each: int, steps: int, delta: float, rdp: float, prv: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    accountants = pytest.importorskip("opacus.accountants", reason="opacus is not installed: make test-dp")
    history = [(z, 1 / each, steps - 100), (z, 1 / each, 100)]  # of two rounds, which are composed
    found, by = ledger.epsilon(history, delta)
    assert (f"{found:.4f}", by) == (f"{prv:.4f}", f"PRV, opacus {version('opacus')}")

    def fails(*args: Any, **options: Any) -> float:
        raise RuntimeError("the grid is too coarse")

    monkeypatch.setattr(accountants.PRVAccountant, "get_epsilon", fails)
    found, by = ledger.epsilon(history, delta)
    assert (f"{found:.4f}", by) == (f"{rdp:.4f}", f"RDP, opacus {version('opacus')}")


def gaussian(mu: float, delta: float) -> float:
    """Return the exact epsilon of a Gaussian mechanism by Balle and Wang, ICML 2018, Theorem 8."""

    def gap(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta)

    return float(brentq(gap, 0.001, 50))


class FullBatches:
    """Stand in for an accountant of Opacus where every batch has all cases: T Gaussians of noise z are one, exactly."""

    history: Sequence[Cost]

    def get_epsilon(self, delta: float, **_: float) -> float:
        assert all(rate == 1 for _, rate, _ in self.history)
        return gaussian(math.sqrt(sum(steps / noise**2 for noise, _, steps in self.history)), delta)


class Useless:
    """Stand in for an accountant that finds no number, or no end."""

    def __init__(self, found: float | Exception) -> None:
        self.found = found

    def get_epsilon(self, delta: float, **_: float) -> float:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture(params=["closed form", "opacus"])
def accountants(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Count by the ledger's own function, with Opacus or with a closed form in its place."""
    monkeypatch.undo()
    if request.param == "opacus":
        return pytest.importorskip("opacus.accountants", reason="opacus is not installed: make test-dp")
    package, module = ModuleType("opacus"), ModuleType("opacus.accountants")
    vars(package).update(__version__="0", accountants=module)
    vars(module).update(PRVAccountant=FullBatches, RDPAccountant=FullBatches)
    for one in (package, module):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return module


@pytest.mark.parametrize(
    ("history", "mu"),
    [
        ([(4.0, 1.0, 3)], math.sqrt(3) / 4),
        ([(4.0, 1.0, 1), (4.0, 1.0, 1), (4.0, 1.0, 1)], math.sqrt(3) / 4),  # of three rounds, which are composed
        ([(4.0, 1.0, 2), (2.0, 1.0, 1), (4.0, 1.0, 2)], math.sqrt(4 / 16 + 1 / 4)),  # one is a noisy report
    ],
)
def test_full_batches_are_the_gaussian_of_a_closed_form(history: list[Cost], mu: float, accountants: Any) -> None:
    found, by = ledger.epsilon(history, 1e-5)
    assert found == pytest.approx(gaussian(mu, 1e-5), abs=4e-3)
    assert by.startswith("PRV, opacus ")


@pytest.mark.parametrize("accountants", ["closed form"], indirect=True)
@pytest.mark.parametrize("found", [math.inf, math.nan, RuntimeError("the grid is too coarse")])
def test_what_prv_cannot_count_is_counted_by_rdp(found: Any, accountants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountants, "PRVAccountant", partial(Useless, found))
    assert ledger.epsilon([(4.0, 1.0, 2), (4.0, 1.0, 1)], 1e-5) == (
        pytest.approx(gaussian(math.sqrt(3) / 4, 1e-5), rel=1e-12), "RDP, opacus 0",
    )  # fmt: skip


@pytest.mark.parametrize("accountants", ["closed form"], indirect=True)
def test_a_book_composes_its_rounds_and_their_reports(tmp_path: Path, accountants: Any) -> None:
    """Compare epsilon_after with the closed form, for a round of 3 steps at noise 4 and a report at noise 2."""
    book = Ledger("site-1", tmp_path)
    one = Spending("train", "patient", 9, 4.0, 1.0, 3, 1.0, 9.0, 1e-5, also=((2.0, 1.0, 1),))
    after = [book.reserve("abc", one, OF) for _ in range(3)]
    wanted = [gaussian(math.sqrt(n * (3 / 16 + 1 / 4)), 1e-5) for n in (1, 2, 3)]
    assert after == pytest.approx(wanted, rel=1e-12)
    assert [line["epsilon_after"] for line in lines(tmp_path)] == after


def test_without_the_package_the_site_refuses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(BudgetRefused, match=r"opacus: pip install 'fairflare\[dp\]'"):
        reserve(tmp_path)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_file_of_the_ledger_that_cannot_be_read_or_written_is_named(which: int, tmp_path: Path) -> None:
    """Put a folder where the ledger, its secret or its head is, as on a disk that was restored wrongly."""
    reserve(tmp_path)
    files(tmp_path)[which].unlink()
    files(tmp_path)[which].mkdir()
    why = r"^site 'site-1': .*its ledger \(.privacy "
    with pytest.raises(BudgetRefused, match=why + ".*Is a directory; let the site's"):
        reserve(tmp_path)


def test_a_ledger_on_a_disk_that_is_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / "secret name"))

    reserve(tmp_path)
    monkeypatch.setattr(ledger, "write_whole", read_only)
    with pytest.raises(BudgetRefused, match=r"its ledger .*: Read-only file system") as found:
        reserve(tmp_path)
    assert "secret name" not in found.value.public
