"""Keep a site's privacy ledger: what each round costs its cases in privacy, written before the round begins.

Each round has one line of JSON: the line's number, the hash of the line before, and a code (HMAC) under the site's
secret key. A copy of the last line's hash (the head) lies in another folder, and a server sends back the hash that the
site reported last. A budget belongs to cases: against a list count all lines whose lists share a case with this list.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import os
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fairflare import __version__
from fairflare.base.checks import refuse
from fairflare.base.disk.files import append, flush_to_disk, private_folder, safe_name, write_whole
from fairflare.base.disk.locks import Held, hold_lock
from fairflare.methods.base.site_run import SiteError

log = logging.getLogger(__name__)

LEDGER, SECRET, LISTS = "ledger.jsonl", "secret", "lists"
BOOKS, HEADS = ".privacy", ".privacy_heads"  # folders in the site's state root; no experiment can be called so
NEEDED = "it needs the package opacus: pip install 'fairflare[dp]'"
SIZE = 32  # bytes of a case's key
ERROR = 1e-3  # largest error of an epsilon by PRV
MORE = 10.0  # by what a round's noise is multiplied to find out whether more of it could help
WAIT = 60.0  # seconds to wait for another process that holds the ledger

Cost = tuple[float, float, int]  # noise multiplier, sampling rate, steps


class BudgetRefused(SiteError):
    """Signal that a site refuses a task because of its privacy setting; the text is also sent to the server."""

    def __init__(self, site: str, why: str) -> None:
        super().__init__(f"site {site!r}: differential privacy: {why}", skipped=True)


def epsilon(history: Iterable[Cost], delta: float, error: float = ERROR) -> tuple[float, str]:
    """Return the epsilon that all steps so far spend together, and the name of the accountant that computed it.

    Args:
        history: noise multiplier z, sampling rate q and number of steps of each line.
        delta: the chance for which epsilon does not hold.
        error: largest error of PRV, by which the result is above PRV's estimate; a larger error takes less time.

    Returns:
        The epsilon by PRV; if PRV fails, that by RDP, which is 9 to 16 % larger.

    Source:
        Gopi et al., NeurIPS 2021 (PRV); Mironov et al., arXiv 1908.10530 (RDP); both by Opacus.
    """
    from opacus import __version__ as version
    from opacus.accountants import PRVAccountant, RDPAccountant

    steps: Counter[tuple[float, float]] = Counter()
    for noise, rate, count in history:
        steps[noise, rate] += count
    prv, rdp = PRVAccountant(), RDPAccountant()
    prv.history = rdp.history = [(noise, rate, count) for (noise, rate), count in sorted(steps.items())]
    try:
        spent = float(prv.get_epsilon(delta, eps_error=error))
        if math.isfinite(spent):
            return spent, f"PRV, opacus {version}"
    except Exception as failure:
        log.warning("PRV cannot count this history, RDP does: %s", failure)
    return float(rdp.get_epsilon(delta)), f"RDP, opacus {version}"


@dataclass(frozen=True)
class Spending:
    """Describe what a round will spend: its noise, draws and steps, and the target epsilon.

    Attributes:
        kind, unit: what is released, and the unit that the guarantee protects: a patient, a volume or an image.
        units: number of units in the list.
        z, q, steps: noise multiplier, chance of a unit to be drawn, and steps.
        sensitivity: norm that a unit's gradient is clipped to.
        target, delta: the largest epsilon at this delta.
        also: costs of the round's noisy report.
    """

    kind: str
    unit: str
    units: int
    z: float
    q: float
    steps: int
    sensitivity: float
    target: float
    delta: float
    also: tuple[Cost, ...] = ()


class Ledger:
    """Count what a site's rounds cost its cases in privacy, and refuse a round that would exceed the target.

    Args:
        site: name of the site.
        root: the site's state root, which outlives its jobs.

    Attributes:
        shown: hash of a line that the server shows, and that the ledger must have; ``None`` if it shows none.
        last: hash of the last line that this object wrote; empty before.
    """

    def __init__(self, site: str, root: Path) -> None:
        name = safe_name(site)
        self.site = site
        self.folder, self.head = root / BOOKS / name, root / HEADS / f"{name}.json"
        self._secret, self.last = b"", ""
        self.shown: Any = None

    def reserve(self, cases: Iterable[Hashable], spending: Spending, more: Mapping[str, Any]) -> float:
        """Write a round into the ledger and to disk, and return the epsilon spent including this round.

        Args:
            cases: identifiers of the list's cases.
            spending: the round.
            more: names of job, experiment and round.

        Raises:
            BudgetRefused: the budget is spent; or the ledger is damaged, older than its head or gone.
            OSError: the disk is full or cannot be written.
        """
        with self._alone():
            if not self._there:
                self._begin()
            lines = self._read()
            keys, past = self._past(cases, lines)
            after, accountant = self._charge(past, spending)
            content = b"".join(sorted(keys))
            digest = hashlib.sha256(content).hexdigest()
            if not (path := self.folder / LISTS / digest).exists():
                write_whole(path, lambda draft: draft.write_bytes(content))
            lines.append(self._sign({
                **vars(spending), **more, "seq": len(lines) + 1, "day": datetime.now(timezone.utc).date().isoformat(),
                "cases": digest, "epsilon_after": after, "accountant": accountant,
                "version": __version__, "prev": _hash(lines),
            }))  # fmt: skip
            append(self.folder / LEDGER, lines[-1], sum(map(len, lines[:-1])))  # without a line that a crash has cut
            self._set_head(lines)
            self.last = _hash(lines)
            return after

    def lasts(self, cases: Iterable[Hashable], spending: Spending, most: int, *, begins: bool = True) -> int:
        """Return for how many rounds like this one the budget of the ledger lasts, at most ``most``; write nothing.

        The number follows from an epsilon that is rough to 1 % of the target; whether one round fits is exact.

        Args:
            cases: identifiers of the list's cases.
            spending: one round.
            most: largest number of rounds that is of interest.
            begins: whether a job is about to write its first line; else no folder is made where there is no ledger.

        Raises:
            BudgetRefused: the budget does not last for one round; or the ledger cannot be trusted.
        """
        rough = max(ERROR, spending.target / 100)
        with self._alone(begins):
            _, past = self._past(cases, self._read() if self._there else [])
            rounds = bisect_right(
                range(1, most + 1), spending.target + rough,
                key=lambda n: epsilon([*past, *_costs(vars(spending)) * n], spending.delta, rough)[0],
            )  # fmt: skip
            if most > 0 and rounds <= 1:
                self._charge(past, spending)
            return rounds

    @property
    def _there(self) -> bool:
        """Return whether there is a ledger, or the server knows of one."""
        return self.folder.exists() or self.head.exists() or self.shown is not None

    def _past(self, cases: Iterable[Hashable], lines: Sequence[bytes]) -> tuple[set[bytes], list[Cost]]:
        """Return the keys of cases, and the costs of all ledger lines whose lists share one of these cases."""
        keys = {self._code(repr(case).encode(), b"case").digest() for case in cases}
        past = list(map(json.loads, lines))
        shares = {digest: not keys.isdisjoint(self._list(digest)) for digest in {line["cases"] for line in past}}
        return keys, [cost for line in past if shares[line["cases"]] for cost in _costs(line)]

    def _charge(self, past: Sequence[Cost], spending: Spending) -> tuple[float, str]:
        """Return the epsilon after a round, and its accountant; refuse a round that would exceed the target."""
        (noise, rate, steps), *also = _costs(vars(spending))
        after, accountant = epsilon([*past, (noise, rate, steps), *also], spending.delta)
        if not after <= spending.target:
            rough = max(ERROR, spending.target / 100)
            help_too = [
                words for words, cost in {
                    ", or more noise there": (MORE * noise, rate, steps),
                    ", or fewer local_epochs or local_steps in the job": (noise, rate, 1),
                }.items()
                if epsilon([*past, cost, *also], spending.delta, rough)[0] <= spending.target
            ]  # fmt: skip
            raise BudgetRefused(
                self.site,
                f"privacy budget {'spent' if past else 'too small for one round'}: with this round epsilon is "
                f"{after:.4f}, the target {spending.target:g} (delta {spending.delta:.3g}); what helps: a larger "
                f"'epsilon' in the site's own file{''.join(help_too)}",
            )
        return after, accountant

    @contextmanager
    def _alone(self, begins: bool = True) -> Iterator[None]:
        """Hold the ledger's lock, if there is a ledger or one begins; refuse if it is held, or opacus not installed."""
        try:
            with (
                hold_lock(self.head.with_suffix(".lock"), f"process {os.getpid()} (privacy ledger)", WAIT, needed=True)
                if begins or self._there
                else nullcontext()
            ):
                yield
        except Held as held:
            raise BudgetRefused(
                self.site, f"its ledger is in use by {held}; end that process, then start again"
            ) from held
        except ModuleNotFoundError as error:
            raise BudgetRefused(self.site, NEEDED) from error
        except OSError as error:
            raise BudgetRefused(
                self.site,
                f"its ledger ({BOOKS} and {HEADS} in its state root) cannot be read or written: {error.strerror}; let "
                "the site's user write both, on a disk with room",
            ) from error

    # -- reading

    def _read(self) -> list[bytes]:
        """Return the lines of the ledger, each with its line end, after all of them are verified.

        Raises:
            BudgetRefused: a line is not as written, or the ledger is gone, or older than its head or what is shown.
        """
        path = self.folder / LEDGER
        needed = (path, self.folder / SECRET, self.folder / LISTS)
        refuse({f"{one.name!r} of its ledger is gone": not one.exists() for one in needed}, self._refusal)
        self._secret = (self.folder / SECRET).read_bytes()
        *lines, cut = path.read_bytes().split(b"\n")
        if cut:
            log.warning("site %s: the last line of its privacy ledger was cut by a crash, and is left out", self.site)
        lines = [line + b"\n" for line in lines]
        for number, line in enumerate(lines):
            try:
                record = json.loads(line)
                signed = self._sign({k: v for k, v in record.items() if k != "mac"})
                good = (line, record["seq"], record["prev"]) == (signed, number + 1, _hash(lines[:number]))
            except (AttributeError, KeyError, TypeError, ValueError):
                good = False
            refuse({f"line {number + 1} of its ledger is damaged, moved or changed": not good}, self._refusal)
        if not self.head.exists():
            refuse({"the head of its ledger is gone": lines}, self._refusal)
            self._set_head(lines)  # a crash came between the first file and its head: nothing was written yet
        try:
            head = json.loads(self.head.read_bytes())
            seq, last = int(head["seq"]), head["hash"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._refusal("the head of its ledger is damaged") from error
        refuse({
            f"its ledger has {len(lines)} lines, and its head knows of {seq}: it is an older one, or cut":
                seq > len(lines),
            "its ledger and its head do not belong together": seq < len(lines) - 1 or last != _hash(lines[:seq]),
            "its ledger lacks the line that the server last heard of: it is an older one, or another":
                self.shown is not None and not any(self.shown == _hash([line]) for line in lines),
        }, self._refusal)  # fmt: skip
        if seq < len(lines):
            self._set_head(lines)
        return lines

    def _list(self, digest: str) -> set[bytes]:
        """Return the keys of a list's cases; a ledger line names the list by this digest."""
        path = self.folder / LISTS / digest
        content = path.read_bytes() if path.exists() else b""
        refuse({
            "a list of cases of its ledger is damaged or gone": hashlib.sha256(content).hexdigest() != digest,
        }, self._refusal)  # fmt: skip
        return {content[k : k + SIZE] for k in range(0, len(content), SIZE)}

    def _refusal(self, why: str) -> BudgetRefused:
        return BudgetRefused(
            self.site,
            f"{why}; what was spent is not known, so nothing is trained. Bring back the newest copy of {BOOKS} and "
            f"{HEADS} in its state root, or have its privacy officer decide on a new one",
        )

    # -- writing

    def _begin(self) -> None:
        """Create an empty ledger with a new secret, atomically."""
        draft = self.folder.with_name(f".{self.folder.name}.new")
        shutil.rmtree(draft, ignore_errors=True)
        private_folder(draft / LISTS)
        for name, content in ((SECRET, os.urandom(SIZE)), (LEDGER, b"")):
            write_whole(draft / name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]
        draft.rename(self.folder)
        flush_to_disk(self.folder.parent)

    def _set_head(self, lines: Sequence[bytes]) -> None:
        head = json.dumps({"seq": len(lines), "hash": _hash(lines)})
        write_whole(self.head, lambda path: path.write_text(head, "utf-8"))

    def _sign(self, record: Mapping[str, Any]) -> bytes:
        """Return a record as a ledger line that includes the HMAC of its content."""
        code = self._code(json.dumps(dict(record), sort_keys=True).encode(), b"line").hexdigest()
        return json.dumps({**record, "mac": code}, sort_keys=True).encode() + b"\n"

    def _code(self, text: bytes, what: bytes) -> hmac.HMAC:
        return hmac.new(self._secret, what + b"\0" + text, hashlib.sha256)


def _costs(line: Mapping[str, Any]) -> list[Cost]:
    """Return the costs of a ledger line, or of a round that is not written yet."""
    return [(line["z"], line["q"], line["steps"]), *line["also"]]


def _hash(lines: Sequence[bytes]) -> str:
    """Return the SHA-256 of the last line; an empty text if there is no line."""
    return hashlib.sha256(lines[-1]).hexdigest() if lines else ""
