"""Keep a site's log of its secure sums, and refuse a sum that together with earlier ones would reveal its numbers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairflare.base.checks import first_of
from fairflare.base.disk.files import append, write_whole
from fairflare.privacy.sums.exposure import Limits, check_table, draw_groups, exposure
from fairflare.privacy.sums.keys import Pairs, SumRefused, need
from fairflare.privacy.sums.masks import BY_PART, GROUPS, NORMS, SumAsked, masks_of, own_key
from fairflare.privacy.sums.ring import SumLayout

#: Names of two files: the log of secure sums, and a record of the log's size and SHA-256 after its last line.
LOG, HEAD = "sums.log", "sums.head"
DEFAULTS = Limits()
Line = dict[str, Any]


class SumLog:
    """Answer the server's requests for secure sums at a site, which opens its own mask only once for each sum.

    Before a vector leaves the site, a line about it is written to disk: run, experiment, round, label, attempt, members
    and weights, digests of question, model and vector. The same holds before the key of the site's own mask leaves.

    Args:
        site: name of the site.
        folder: the site's folder of the experiment, which outlives a job; only one process at a time may use it.
        experiment: name of the experiment.
        limits: what the site allows.
        parts: the groups of sites whose sums the server opens, with each site's weight in its own; empty if it opens
            one sum of all sites.
    """

    def __init__(
        self, site: str, folder: Path, experiment: str, limits: Limits = DEFAULTS,
        parts: Sequence[Mapping[str, float]] = (),
    ) -> None:  # fmt: skip
        self.site, self.experiment, self.limits, self.file = site, experiment, limits, folder / LOG
        self.parts = [dict(part) for part in parts]

    def mask_update(
        self, question: SumAsked, pairs: Pairs, layout: SumLayout, update: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        """Return the site's masked numbers, and how many of them were clipped; a repeated request gets the same bits.

        Args:
            question: the sum that the server asks for.
            pairs: the keys that the site shares with the other sites.
            layout: order and layers of the tensors.
            update: the site's tensors, each read once.

        Raises:
            SumRefused: a rule forbids it; the text names what to do.
            OSError: the disk is full or cannot be written.
        """
        before = self._check(question, pairs)
        row, ring, masks = question.table[self.site], question.ring, masks_of(question, pairs)
        self._need(
            len(row) == len(layout.layers), question,
            f"the table has {len(row)} layers, its model {len(layout.layers)}; use one model",
        )  # fmt: skip
        update = question.weigh_update(self.site, layout, update)
        sent, content, start, saturated = np.empty(layout.numbers, ring.words), hashlib.sha256(), 0, 0
        for name, shape in layout.shapes.items():
            tensor = update[name].detach()
            self._need(
                tensor.shape == shape, question,
                f"tensor {name!r} is {tuple(tensor.shape)}, not {shape}; use one model everywhere",
            )  # fmt: skip
            for part in layout.parts(name):
                values = tensor.reshape(-1)[part].cpu().double().numpy()
                self._need(
                    np.isfinite(values).all(), question, f"tensor {name!r} is not finite; lower the learning rate"
                )
                saturated += int(np.count_nonzero(np.abs(values) > ring.bound))
                block = sent[start : (start := start + len(values))]
                block[:] = ring.quantise(values, row[layout.columns[name]])
                content.update(block.data)
                masks.put_on(block)
        self._need(
            {line["vector"] for line in before} <= {content.hexdigest()}, question,
            "its numbers are others than before; bring its kept update back, or leave it out",
        )  # fmt: skip
        if not any(self._is_about(line, question, pairs) for line in before):
            self._append({
                "what": "sent", "run": pairs.run.hex(), "experiment": self.experiment,
                **{name: getattr(question, name) for name in ("round", "label", "attempt", "members", "table")},
                "vectors": question.vectors, "context": question.context().hex(), "model": question.model.hex(),
                "vector": content.hexdigest(), "day": datetime.now(timezone.utc).date().isoformat(),
                "parts": self.parts,
            })  # fmt: skip
        return torch.from_numpy(sent.view(f"<i{ring.bits // 8}")), saturated

    def release(self, question: SumAsked, pairs: Pairs, present: Iterable[str]) -> bytes:
        """Return the key of the site's own mask, after the log on disk says that the site gives it away.

        Args:
            question: the sum that the server asked for.
            pairs: the keys that the site shares with the other sites.
            present: the sites whose vectors the server has; it must be all members (and may be other groups' ones).

        Raises:
            SumRefused: a member is missing, another attempt is open, or another rule forbids it.
            OSError: the disk is full or cannot be written.
        """
        # Checked again, as another sum of the same numbers may be open by now.
        sent = [line for line in self._check(question, pairs) if self._is_about(line, question, pairs)]
        self._need(sent, question, "it has sent no numbers for this question; ask for them first")
        there, members = sorted(one for one in present if not self.parts or one in question.table), question.members
        self._need(there == members, question, f"present are {there}, not all of {members}; ask again without others")
        if not sent[0]["opened"]:
            self._append({"what": "released", "run": sent[0]["run"], "context": sent[0]["context"]})
        return own_key(question, pairs)

    # ------------------------------------------------------------------------------------------------ rules

    def _check(self, question: SumAsked, pairs: Pairs) -> list[Line]:
        """Refuse a question that does not fit what was sent and opened before.

        Returns:
            Lines about numbers sent for this question, or opened for an equal one of the same round before; the same
            numbers must now be sent.
        """
        before, rows, asked, lines = list[Line](), [], question.plain(), self._read()
        self._check_parts(question, [line for line in lines if line["experiment"] == self.experiment])
        for line in lines:
            if this := self._is_about(line, question, pairs):
                before.append(line)
            elif line["run"] == pairs.run.hex():
                self._need(
                    line["round"] <= question.round, question,
                    f"round {line['round']} has begun; an earlier one is over",
                )  # fmt: skip
                # Each exchange of a recalibration has another model, in which the earlier norms are measured already.
                same = (line["round"], line["label"]) == (question.round, question.label) and (
                    question.label != NORMS or line["model"] == asked["model"].hex()
                )
                why = f"attempt {line['attempt']} {{}} already; ask it again, or with a higher number"
                self._need(not (same and line["opened"]), question, why.format("is open"))
                self._need(not same or line["attempt"] < question.attempt, question, why.format("was asked for"))
            same, identity = line["model"] == asked["model"].hex(), (self.experiment, question.vectors)
            # A group has the same number of images for every model, so a sum of other members would reveal a site's.
            alike = (line["experiment"], line["vectors"]) == identity and (same or question.label == GROUPS)
            # What a group's sum shows beside that of all sites is the matter of :meth:`_check_parts`.
            if this or not line["opened"] or not alike or bool(line.get("parts")) != bool(self.parts):
                continue
            gone = sorted({*line["members"]} - {*question.members})
            if line["label"] != question.label:
                rows.append(line["table"])
                continue
            self._need(
                line["table"] == asked["table"], question,
                f"{'the same model was' if same else 'groups were'} summed with other members or weights in round "
                f"{line['round']}; ask with these{', or go on from a newer model' * (question.label != GROUPS)}"
                f"{f'. If {gone} cannot come back, only another experiment helps' * bool(gone and same)}",
            )  # fmt: skip
            # In a later round the site has trained anew, and has other numbers; norms of one model are always the same.
            before += [line] * (same and (line["round"] == question.round or question.label == NORMS))
        check_table(self.site, question, self.limits, pairs, rows, sum(map(len, self.parts)))
        return before

    def _check_parts(self, question: SumAsked, lines: Iterable[Line]) -> None:
        """Refuse a sum of some of the sites, unless they are this site's group of the only draw in the experiment.

        Updates of neighbouring rounds are nearly equal: from sums over two partitions of the sites, or with other
        weights in a group, single sites' updates could be computed.

        Args:
            question: the sum that the server asks for.
            lines: what was sent in this experiment.
        """
        parts = self.parts
        # Numbers of groups of people are no part of an update: the sites are never dealt for their sums.
        fixed = next((line["parts"] for line in lines if line.get("parts") and question.label != GROUPS), parts)
        if not fixed:
            return
        all_sites = [line for line in lines if line["model"] == question.model.hex() and not line.get("parts")]
        group = next((part for part in parts if self.site in part), {self.site: 0.0})
        rows = [
            *(line["table"] for line in all_sites if line["opened"] and line["vectors"] == question.vectors),
            *({site: (weight,) for site, weight in part.items()} for part in parts),
        ]
        names = sorted({self.site, *(site for row in rows for site in row)})
        shown = float(exposure([*rows, {self.site: (0.0,)}])[:, names.index(self.site)].max())
        problem = first_of({
            f"sums of {[sorted(part) for part in fixed]} were opened, with fixed weights; others "
            "would show single sites, so ask for these, or begin another experiment": parts != fixed,
            f"numbers by {BY_PART.get(question.label)} are not summed in groups": question.label in BY_PART,
            "its groups are not drawn from the members of a sum of this model in an earlier round, so that they would "
            "show single sites": not any(line.get("parts") for line in lines) and not any(
                line["round"] < question.round and draw_groups(self.experiment, weights) == parts
                for line in all_sites
                # Weights by layer are not those of a site; all are then equal.
                for weights in ({s: row[0] for s, row in line["table"].items()}, dict.fromkeys(line["members"], 1.0))
            ),
            "a sum of all sites with these numbers is open; train anew before": any(
                line["opened"] and line["round"] == question.round for line in all_sites
            ),
            f"its members are {question.members}, its group is {sorted(group)}": question.members != sorted(group),
            "its weights are not those of its group": any(
                {*row} != {group.get(site)} for site, row in question.table.items()
            ),
            f"its group's sum beside that of all sites would show its numbers to {shown:.4f}, this site allows "
            f"{self.limits.max_exposure:g} (secure_max_exposure)": shown > self.limits.max_exposure,
        })  # fmt: skip
        self._need(not problem, question, problem)

    def _is_about(self, line: Line, question: SumAsked, pairs: Pairs) -> bool:
        """Return whether a line of the log is about exactly this question, in this run."""
        return bool((line["run"], line["context"]) == (pairs.run.hex(), question.context().hex()))

    def _need(self, good: object, question: SumAsked, why: str) -> None:
        need(good, SumRefused(self.site, f"sum {question.label!r} of round {question.round}: {why}"))

    # ------------------------------------------------------------------------------------------------ disk

    def _read(self) -> list[Line]:
        """Return the lines about what was sent, each with whether its own mask was opened."""
        *whole, cut = (content := self.file.read_bytes() if self.file.exists() else b"").split(b"\n")
        if cut:  # a crash cut the last line off: what it is about was not sent
            os.truncate(self.file, len(content) - len(cut))
        try:
            head = self.file.with_name(HEAD)
            size, checksum = head.read_text("utf-8").split() if head.exists() else ("0", _hash(b""))
            need(_hash(content[: int(size)]) == checksum, ValueError(f"it is not the log that {HEAD} tells of"))
            lines = list(map(json.loads, whole))
            opened = {(line["run"], line["context"]) for line in lines if line["what"] == "released"}
            return [
                {**line, "opened": (line["run"], line["context"]) in opened} for line in lines if line["what"] == "sent"
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise SumRefused(
                self.site,
                f"its log of sums ({LOG}) is damaged, cut, older than {HEAD} or gone, so what was opened is not known; "
                "bring back both as they were, or begin another experiment",
            ) from error

    def _append(self, record: Mapping[str, Any]) -> None:
        """Add a line and wait until it is on disk."""
        append(self.file, json.dumps(dict(record)).encode() + b"\n")
        content, head = self.file.read_bytes(), self.file.with_name(HEAD)
        write_whole(head, lambda path: path.write_text(f"{len(content)} {_hash(content)}", "utf-8"))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
