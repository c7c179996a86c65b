"""Open weighted sums of the sites' updates; the server never holds a single site's update (``secure="sums"``).

The sites agree on keys that the server does not know. In each round the sites train and report, and the rule weighs.
Every site then receives the whole table of weights and sends its weighted update under masks, which cancel only in the
sum over all sites. If a site is lost before the sum is opened, a new attempt is made with fewer sites; a site that is
lost while the sum is opened is asked again. A sum that cannot be opened costs its round, and new keys follow; after two
such rounds sums are opened in groups of sites, so that what is wrong is confined to a group.
``docs/secure_sums.md`` says what the server learns all the same.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from fairflare.base.checks import list_names, printable, refuse, refuse_if
from fairflare.core.aggregation.partial_slices import PartialSlices
from fairflare.core.features.batch_norms import MEAN, VARIANCE
from fairflare.core.features.layers import layers_of
from fairflare.core.states import Made
from fairflare.core.statistics.group_sums import BRIER, CALIBRATION, CASES, DICE, IMAGES, Array
from fairflare.exchange.messages import TASK_KEYS, TASK_MASK, TASK_RELEASE, Message, clean_tensor
from fairflare.federation.collecting.phase import Exchange, Phase, RoundFailed
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.record.journal import Journal
from fairflare.federation.site.groups import blank, pieces
from fairflare.federation.site.replies import name_site_in_reason, read_head, reasons
from fairflare.federation.site.sums import HELLOS, PARTS, PRESENT, QUESTIONS, RUN, SATURATED
from fairflare.methods.base.reports import NO_IMAGES, Field, ReportError, read_report
from fairflare.methods.base.rule import LayerWeights, State, Weighing
from fairflare.privacy.sums.exposure import Limits, draw_groups, soften_weights
from fairflare.privacy.sums.keys import FEWEST, SIZE, hello_of, need
from fairflare.privacy.sums.masks import (
    CLASS_GRADIENTS,
    COUNTS,
    FIRST_OF_TWO,
    GROUPS,
    MEANS,
    NORMS,
    Addition,
    SumAsked,
    SumSpoiled,
    Table,
    additions_for,
    digest,
    open_sums,
)
from fairflare.privacy.sums.ring import BUFFERS, SUMS, TRAINED, Ring, SumLayout, kinds
from fairflare.reporting.documents import LeftOut, RoundRecord, Warned

MOST_OF_HELLO = 2**14  # bytes of one part of a hello
PAUSE = 1.0  # seconds until sites are asked again for their own masks; doubled each time
PATIENCE = 2  # lost rounds after which sums are opened in groups of sites
REFUSES = re.compile(r"^site '[^']*' says: .*?site '([^']*)'")  # a site's reason that is about another site
NOBODY: Mapping[str, str] = MappingProxyType({})
Weights: TypeAlias = Mapping[str, float]
LATE = "not in the sums that were lost before the sites were dealt to groups; another experiment has it in again"
MASKED = (Field(SATURATED, "whole", low=0, of=NO_IMAGES, doc="how many numbers of the update the sum's bound cut"),)


class SitesLost(Exception):
    """Signal that a sum cannot be opened, as some of its sites are lost; the argument: reasons by lost site."""


class SumLost(RoundFailed):
    """Signal that the sum of all sites is none, which costs the round."""


class SecureSums:
    """Lead the exchanges with the sites that secure sums need, at the server.

    Args:
        run: settings of the run.
        ask, journal: the run's exchange with the sites, and its journal.

    Attributes:
        kept: what a resumed job must know: number of lost rounds, the model and the weights of the last one, and the
            groups in which sums are opened, with each site's weight in its own.
        out: reason for each site whose group is left out for the rest of the job.
    """

    def __init__(self, run: RunSettings, ask: Exchange, journal: Journal) -> None:
        self.run, self.ask, self.journal = run, ask, journal
        self.kept: dict[str, Any] = {"lost": 0, "model": "", "weights": {}, "parts": []}
        self.out: dict[str, str] = {}
        self.attempt = 0
        self._asked: dict[str, dict[str, Any]] = {}
        self._done: dict[tuple[bytes, str], dict[tuple[str, ...], dict[str, State]]] = {}
        self._anchor: tuple[list[str], State] | None = None
        self.learn_layout((), dict)
        self.renew()

    def learn_layout(self, slices: Sequence[PartialSlices], bounded: Callable[..., Mapping[str, float]]) -> None:
        """Store which slices not all sites own, and what limits the weights of those that own one."""
        self.slices, self.bounded = slices, bounded

    def renew(self) -> None:
        """Have the sites agree on new keys before the next sum; a resumed job has new keys too."""
        self.id, self.agreed, self._owners = os.urandom(SIZE), list[str](), dict[bytes, str]()
        self.ask.form["sums"] = {RUN: self.id}

    def agree(
        self, current_round: int, live: Sequence[str], *, two: bool = False, out: Mapping[str, str] = NOBODY
    ) -> dict[str, str]:
        """Let the live sites agree on keys unless they have done so; return the reason for each site without a key.

        A site whose key two others refuse is left out; if only one does, that one is.

        Args:
            current_round, live: number of the round, and its sites.
            two: whether the round opens two sums of the same numbers; the sites then demand one more member.
            out: reasons for sites that are left out already.

        Raises:
            RoundFailed: too few sites have keys.
        """
        dealt = {site for part in self.kept["parts"] for site in part}
        out = {**out, **{s: self.out.get(s, LATE) for s in live if s in self.out or (dealt and s not in dealt)}}
        live = [site for site in live if site not in out]
        if {*self.agreed} & {*self.out}:  # a site counts all with whom it has agreed as members to come
            self.renew()
        if set(live) <= set(self.agreed):
            return out
        hellos: dict[str, dict[str, bytes]] = {}

        def take_hello(phase: Phase, site: str, message: Message) -> None:
            parts = _bytes_of(site, message, current_round, {"hello", "certificate", "signature"}, MOST_OF_HELLO)
            owner = self._owners.setdefault((hello := parts.get("hello", b""))[-SIZE:], site)
            refuse_if(site, {
                "its hello is of another run, site or version": hello != hello_of(self.id, site, hello),
                f"it shows the key of site {owner!r}, which sent it first": owner != site,
            })  # fmt: skip
            hellos[site] = parts

        timeout, fewest, two = self.run.check_timeout, self.run.min_sites, two and not dealt
        least = max(FEWEST + two, fewest)
        first = second = self.ask(TASK_KEYS, current_round, {}, live, timeout, take_hello)
        if len(first.good) >= least:
            shown = {RUN: self.id, HELLOS: [hellos[site] for site in first.good]}
            second = self.ask(TASK_KEYS, current_round, {}, sorted(first.good), timeout, _head_only, sums=shown)
        left = {**out, **first.left_out, **second.left_out}
        about = {why: match[1] for why in second.left_out.values() if (match := REFUSES.search(why))}
        (worst, count), *_ = [*Counter(about.values()).most_common(1), ("", 0)]
        if count > 1 and worst in hellos:
            self.renew()  # the others have agreed with it already, and would miss it
            rest, why = [site for site in live if site != worst], next(w for w, site in about.items() if site == worst)
            return self.agree(current_round, rest, two=two, out={**out, worst: why})
        if len(second.good) < least:
            raise RoundFailed(
                f"round {current_round}, keys: {len(second.good)} site(s) {'sent' if second is first else 'agreed on'} "
                f"keys, secure sums{' of this method' * two} need {least} sites"
                f"{'; fed_avg needs one less' * (two and least > fewest)}. Left out: {reasons(left.items()) or 'none'}",
                second,
            )
        self.agreed = sorted(second.good)
        signed = all(len(parts) > 1 for parts in hellos.values())
        safety = "signed with certificates" if signed else "unsigned: protects from a curious server only"
        brief = f"Secure sums of {len(self.agreed)} sites, keys {safety}"
        text = (
            f"{brief}. No site's model leaves it; the server learns reports and metrics of each, the weights, the "
            "sums, and who took part"
        )
        self.journal.tell("note", text=brief)
        self.journal.say(text)
        self.journal.store.update_info(sums=text)
        return left

    def begin(self, record: RoundRecord, received: State, trained: Sequence[str] | frozenset[str]) -> None:
        """Begin a round with the model that the sites receive.

        Args:
            record: the round's record.
            received: the tensors that the sites train and that are summed, as they received them.
            trained: names of the trained parameters; other floating tensors are buffers.
        """
        self.record, self.received, self.kinds = record, received, kinds(received, trained)
        self.model = digest({name: received[name] for name in (*self.kinds.params, *self.kinds.buffers)})
        self.attempt, self._anchor, self._begun, self._asked, self._done = 0, None, self.model.hex(), {}, {}
        self._before = self.kept["weights"] if self.kept["model"] == self._begun else {}

    def anchor(self, sites: Sequence[str], steps: Mapping[str, int | None]) -> State:
        """Return the plain mean of the sites' models.

        Args:
            sites: the sites.
            steps: number of optimizer steps of each site.

        Raises:
            SitesLost: a new attempt is needed.
        """
        weighing = Weighing(sites=dict.fromkeys(sites, 1.0 / len(sites)))
        _, state = self._sum(("anchor", "anchor_buffers"), weighing, steps)
        self._anchor = sorted(sites), state
        return state

    def mean(self, weighing: Weighing, steps: Mapping[str, int | None]) -> tuple[Weighing, State]:
        """Return the weights that were used, and the mean of the sites' models with them.

        Args:
            weighing: the weights that the rule chose.
            steps: number of optimizer steps of each site.

        Raises:
            SitesLost: a new attempt is needed.
        """
        try:
            return self._sum(("params", "buffers"), weighing, steps)
        except SitesLost as lost:
            if self._anchor is None:
                raise
            # The plain mean is open: beside it, a sum without the lost site would reveal that site's update.
            sites, state = self._anchor
            self.journal.say(
                f"round {self.record.current_round}: {list_names(lost.args[0])} lost after the plain mean of "
                f"{len(sites)} sites was opened, and the round takes this mean",
                warning=True,
            )
            return replace(weighing, sites=dict.fromkeys(sites, 1 / len(sites)), layers=None, record={}), state

    def moments(self, asked: State, like: State, weights: LayerWeights) -> State:
        """Return mean and variance of batch norms' inputs over all sites, from a secure sum.

        Args:
            asked: the model whose norms the sites measured.
            like: the measured norms' present means and variances.
            weights: weight by norm and site.

        Raises:
            SitesLost: some sites were lost; the others must measure again without them.
        """
        self.model, self._anchor = digest(asked), None
        even, members = set[str](), sorted(next(iter(weights.values())))
        question = self._question(NORMS, BUFFERS, like, weights, members, even)
        self._even_weights(Weighing(layers=weights), (even, set()), members)
        means = dict(self._open_sums([question], members)[0])
        for name in weights:  # the sites send the mean square, as variances cannot be averaged
            means[f"{name}.{VARIANCE}"] = (means[f"{name}.{VARIANCE}"] - means[f"{name}.{MEAN}"] ** 2).clamp_min(0)
        return means

    def counts(self, record: RoundRecord, asked: State, like: State, members: list[str]) -> dict[str, torch.Tensor]:
        """Return the sums over all members of counts of the names and shapes of ``like``, float64.

        Raises:
            SitesLost: some sites were lost; the others must count again without them.
        """
        self.record, self.model, self._anchor = record, digest(asked), None
        even = {"": dict.fromkeys(members, 1 / len(members))}
        (opened,) = self._open_sums([self._question(COUNTS, SUMS, like, even, members, set())], members)
        return {name: opened[name] * len(members) for name in like}

    def groups(
        self, record: RoundRecord, asked: State, has: Mapping[str, tuple[list[str], Array]],
        form: Mapping[str, tuple[int, ...]],
    ) -> tuple[dict[str, dict[str, Array]], list[str]]:  # fmt: skip
        """Return the sums of each group of people over all sites, and the groups that too few sites have.

        Sums that only one or two sites have are NaN.

        Args:
            record: record of the round that would receive the model; the exchanges and lost sites are added to it.
            asked: the tested model.
            has: for each site the names of the groups, and for each of their sums a number, as
                :func:`fairflare.federation.site.groups.read_kept` returns them.
            form: shapes of a group's sums.

        Raises:
            RoundFailed: a site is lost while the sum is opened.
        """
        self.record, self.model, self._anchor = record, digest(asked), None
        record.left_out += [LeftOut(site, TASK_MASK, why) for site, why in self.out.items() if site in has]
        has = {site: x for site, x in has.items() if site not in self.out}
        names, members = next((names for names, _ in has.values()), []), sorted(has)
        if len(has) < FEWEST:
            self.journal.say(f"groups: {len(has)} site(s) have sums, needed are {FEWEST}: none is opened", warning=True)
            return {}, names
        signs, sums = np.stack([has[site][1] for site in members]), blank(names, form)
        owners, views = ((signs == 2).sum(0).tolist(), {f"{place:06d}": x for place, x in enumerate(pieces(sums))})
        weights = {
            label: {site: float(mine) / n if n >= FEWEST else 0.0 for site, mine in zip(members, owns, strict=True)}
            for label, owns, n in zip(views, signs.T == 2, owners, strict=True)
        }
        like = {f"{label}.sum": torch.zeros(len(view)) for label, view in views.items()}
        try:
            if no_key := self.agree(record.current_round, members):
                record.left_out += [LeftOut(site, TASK_KEYS, reason) for site, reason in no_key.items()]
                raise SitesLost(no_key)
            (opened,) = self._open_sums([self._question(GROUPS, SUMS, like, weights, members, set())], members)
        except SitesLost as lost:
            return self.groups(record, asked, {s: x for s, x in has.items() if s not in lost.args[0]}, form)
        for (label, view), n, answers in zip(views.items(), owners, signs.T, strict=True):
            view[:] = opened[f"{label}.sum"].numpy() * n if n >= FEWEST or (n == 0 and answers.any()) else np.nan
        few = [name for name, n in zip(names, owners[:: len(views) // len(names)], strict=True) if 0 < n < FEWEST]
        self._warn_of_exposure(
            len(few), f"sums of {list_names(few, 5)} are not opened: fewer than {FEWEST} sites have one"
        )
        known = {
            key: np.round(values, 6 if key in (CALIBRATION, BRIER, DICE) else 0)  # all other sums are counts
            for key, values in sums.items()
            if key in (IMAGES, CASES) or not np.isnan(values).all()
        }
        return {name: {key: x[row] for key, x in known.items()} for row, name in enumerate(names)}, few

    def _warn_of_exposure(self, number: int, text: str) -> None:
        """Record a warning that a ``number`` of sums would show single sites, and so are not opened; none for 0."""
        self.journal.record_warnings([Warned("", "exposure", number, 0.0, text)] * bool(number), self.record)

    # ------------------------------------------------------------------------------------------------ one sum

    def _sum(
        self, labels: tuple[str, str], weighing: Weighing, steps: Mapping[str, int | None]
    ) -> tuple[Weighing, State]:
        """Return the weights that were used, and the received model with the mean update.

        Raises:
            SitesLost, SumLost: as :meth:`_open_sums`.
        """
        members, before = _sites(vars(weighing)), {} if self.kept["parts"] else self._before.get(labels[0], {})
        if before:  # other members or weights beside the lost sum of this model would show single sites
            refuse({
                f"round {self.record.current_round}: {list_names({*_sites(before)} - {*members})} is gone since the "
                "lost sum of the same model": members != _sites(before),
            }, SumLost)  # fmt: skip
            weighing = replace(weighing, **before)
        even = (set[str](), set[str]())
        parts = zip(
            labels, (self.kinds.params, self.kinds.buffers), (TRAINED, BUFFERS),
            (weighing.sites or {}, weighing.buffers or weighing.sites or {}), even, strict=True,
        )  # fmt: skip
        asked = [
            self._question(label, ring, {name: self.received[name] for name in names},
                           weighing.layers or {"": of_sites}, members, of_part)
            for label, names, ring, of_sites, of_part in parts if names
        ]  # fmt: skip
        weighing = self._even_weights(weighing, even, members)
        self._asked[labels[0]] = {name: vars(weighing)[name] for name in ("sites", "layers", "buffers")}
        # In groups, classes that not all sites have would give single sites away beside earlier sums of all.
        if by_class := None if self.kept["parts"] else weighing.by_class:
            few = [label for label, by_site in by_class.items() if sum(map(bool, by_site.values())) < FEWEST]
            by_class = by_class | {label: dict.fromkeys(members, 0.0) for label in few}
            asked.append(self._question(CLASS_GRADIENTS, BUFFERS, weighing.means, by_class, members, set()))
            self._warn_of_exposure(len(few), (
                f"gradients of classes {list_names(few, 5)} are not summed: fewer than {FEWEST} sites have one, or the "
                "run's bounds forbid equal weights"
            ))  # fmt: skip
        sums = self._open_sums(asked, members) if asked else []
        weighing.means = sums.pop() if by_class else {}
        update = {name: part for part in sums for name in part}
        received, most = self.received, max((n or 0 for n in steps.values()), default=0)

        def make(name: str) -> torch.Tensor:
            if name in update:
                return received[name].double() + update[name][name]
            return received[name] + most if name in self.kinds.steps else received[name]

        return weighing, Made(received, make)

    def _question(
        self, label: str, ring: Ring, like: State, by_layer: LayerWeights, members: Sequence[str], even: set[str]
    ) -> tuple[SumAsked, SumLayout]:
        """Return the question for a mean, and its layout; add to ``even`` the layers that must have equal weights."""
        layout = SumLayout.make(like, None if by_layer.keys() == {""} else layers_of(like))
        table = {site: tuple(float(by_layer[layer][site]) for layer in layout.layers) for site in members}
        in_parts = bool(self.kept["parts"]) and label != GROUPS  # a group's weights are fixed, and so one sum is enough
        opened = [{site: (1 / len(members),) for site in members}] * (self._anchor is not None and not in_parts)
        table, columns = soften_weights(table, opened, Limits().max_exposure)
        even |= {layout.layers[column] for column in columns}
        least = FEWEST + (label in FIRST_OF_TWO or self._anchor is not None)
        slices = self._slices(layout, table, least) if ring == TRAINED else ""
        label = MEANS[label] if in_parts else label
        return SumAsked(self.record.current_round, self.attempt, label, ring, self.model, table, slices), layout

    def _slices(self, layout: SumLayout, table: Table, least: int) -> str:
        """Return what :attr:`SumAsked.slices` says, for slices (structures, channels) that not all members own."""
        slices = [
            (name, slices.axis, [
                self._owners_weights({site: row[layout.columns[name]] for site, row in table.items()}, lacking, least)
                for lacking in slices.lacking
            ])
            for slices in self.slices for name in slices.tensors if name in layout.columns
        ]  # fmt: skip
        few = sum(by_slice.count({}) for _, _, by_slice in slices)
        self._warn_of_exposure(few, (
            f"{few} slice(s) of tensors, of channels or structures, stay: fewer than {least} sites of the sum have them"
        ))  # fmt: skip
        return json.dumps(slices) if any(share is not None for _, _, by_slice in slices for share in by_slice) else ""

    def _owners_weights(self, weights: Weights, lacking: Set[str], least: int) -> dict[str, float] | None:
        """Return the owners' weights of a slice, equal where others would show a site's numbers; empty: not summed."""
        owners = {site: weight for site, weight in weights.items() if site not in lacking and weight > 0}
        if not lacking & weights.keys() or len(owners) < least or self.kept["parts"]:
            return {} if lacking & weights.keys() else None
        total, even = sum(owners.values()), dict.fromkeys(owners, (1 / len(owners),))
        bounded_shares = self.bounded({site: weight / total for site, weight in owners.items()}).items()
        opened = [even] * (self._anchor is not None)
        rows, _ = soften_weights({site: (weight,) for site, weight in bounded_shares}, opened, Limits().max_exposure)
        return {site: weight for site, (weight,) in rows.items()}

    def _even_weights(self, weighing: Weighing, parts: tuple[set[str], set[str]], members: Sequence[str]) -> Weighing:
        """Return the rule's weights, made equal in layers in which they would show a single site's update.

        Args:
            weighing: the rule's weights.
            parts: names of the layers of the trained tensors, and of the buffers; ``""`` stands for all layers.
            members: the sites.
        """
        if not (layers := sorted(parts[0] | parts[1])):
            return weighing
        even = dict.fromkeys(members, 1 / len(members))
        alone = " (trained tensors alone)" * (not parts[1]) + " (buffers alone)" * (not parts[0])
        where = f"layers {list_names(layers, 3)}" if weighing.layers else f"this round{alone}"
        text = f"weights of {where} made equal: the method's would show one site's update"
        warning = Warned("", "exposure", 1.0, Limits().max_exposure, text, len(layers) if weighing.layers else None)
        self.journal.record_warnings([warning], self.record)
        if weighing.layers is None:
            buffers = weighing.buffers or weighing.sites
            return replace(weighing, sites=even if parts[0] else weighing.sites, buffers=even if parts[1] else buffers)
        record = {
            layer: {site: {**entry, "weight": even[site]} for site, entry in by.items()} if layer in layers else by
            for layer, by in weighing.record.items()
        }
        return replace(weighing, layers={**weighing.layers, **dict.fromkeys(layers, even)}, record=record)

    def _open_sums(self, asked: Sequence[tuple[SumAsked, SumLayout]], members: list[str]) -> list[State]:
        """Ask all members for masked vectors, then for the keys of their own masks, and return the opened sums.

        A sum that a group of sites has opened in this round is not asked for again.

        Raises:
            SitesLost: sites were lost before any mask was opened, or groups have no sum.
            SumLost: the sites have opened their masks, and the sum of all is none.
        """
        self.attempt, number, label = self.attempt + 1, self.record.current_round, asked[0][0].label
        dealt: list[dict[str, float]] = self.kept["parts"] if label != GROUPS else []
        parts = [part for part in dealt if part.keys() <= {*members}] if dealt else [dict.fromkeys(members, 1.0)]
        done = self._done.setdefault((self.model, label), {})
        totals, keys = dict[str, dict[str, Addition]](), dict[str, dict[str, bytes]]()
        for part in (part for part in parts if tuple(part) not in done):
            totals |= dict.fromkeys(part, additions_for(asked, part if dealt else None))
        every = {id(total): total for total in totals.values()}.values()  # those of a part's sites are one object
        plain = [total.question.plain() for additions in every for total in additions.values()]
        asking = {RUN: self.id, QUESTIONS: plain, **({PARTS: dealt} if dealt else {})}

        def add(phase: Phase, site: str, message: Message) -> None:
            self._add(site, message, totals[site], sum(layout.numbers for _, layout in asked))

        def take_key(phase: Phase, site: str, message: Message) -> None:
            keys[site] = _bytes_of(site, message, number, set(totals[site]), SIZE, all_of=True)

        timeout = self.run.anchor_timeout
        masked = self.ask(TASK_MASK, number, {}, sorted(totals), timeout, add, sums=asking)
        self.journal.record_left_out(masked, self.record)
        self.agreed = [site for site in self.agreed if site not in masked.left_out]  # it may have lost its key
        if masked.left_out and not dealt:
            raise SitesLost({site: masked.left_out[site] for site in members if site in masked.left_out})
        asking[PRESENT] = missing = sorted(s for part in parts if masked.good.keys() >= part.keys() for s in part)
        released, pause, end, over = masked, PAUSE, time.monotonic() + timeout, False
        while missing and not over:  # a site that released its mask joins no other attempt: exactly these are needed
            released = self.ask(TASK_RELEASE, number, {}, missing, timeout, take_key, sums=asking)
            missing, over = [site for site in missing if site not in keys], time.monotonic() + pause > end
            if pause == PAUSE or over or not missing:
                self.journal.record_left_out(released, self.record)
            if missing and over and not dealt:
                raise SumLost(
                    f"round {number}, release of the masks: {reasons(released.left_out.items())}. Without all of "
                    f"{list_names(members)} the sum is lost", released
                )  # fmt: skip
            time.sleep(pause * bool(missing and not over))
            pause *= 2
        for part in (part for part in parts if keys.keys() >= part.keys()):
            try:
                done[tuple(part)] = open_sums(totals[min(part)], {site: keys[site] for site in part})
            except SumSpoiled as error:
                if not dealt:
                    raise SumLost(f"round {number}: {error}") from error
        if lost := {site: "" for site in members if not any(site in part for part in done)}:
            raise SitesLost(self._leave(lost, keys.keys(), masked.left_out | released.left_out))
        return [_join_groups(done, *one) for one in asked]

    def _add(self, site: str, message: Message, additions: Mapping[str, Addition], numbers: int) -> None:
        """Add a site's masked vectors, of so many numbers, to the sums for which it was asked.

        Raises:
            ReportError: the vectors are not those that were asked for (names site and problem).
        """
        clipped = read_report(read_head(site, message, self.record.current_round).get("report"), MASKED, site)[
            SATURATED
        ]
        sent = message.params if isinstance(message.params, Mapping) else {}
        had = list_names([str(name)[:40] for name in sent], 5)
        refuse_if(site, {
            f"asked for the sums {list_names(additions)}, it sent {had or 'none'}": sent.keys() != additions.keys(),
            f"field {SATURATED!r} is {clipped}, its update has {numbers} numbers": clipped > numbers,
        })  # fmt: skip
        try:
            for label, total in additions.items():
                total.add(site, clean_tensor(label, sent[label]))
        except (TypeError, ValueError) as error:
            raise ReportError(name_site_in_reason(site, printable(str(error)))) from error
        if clipped > 1e-6 * numbers:
            text = f"{clipped} of {numbers} numbers of its update were cut to the bound of the sum"
            self.journal.record_warnings([Warned(site, "secure", clipped, 0.0, text)], self.record)

    def _leave(self, lost: Mapping[str, str], released: Set[str], gone: Mapping[str, str]) -> dict[str, str]:
        """Record sites whose group has no sum, and return why; leave a group out for good if its whole sum is wrong.

        Args:
            lost: the sites.
            released: sites that have sent their numbers and the keys of their masks.
            gone: reasons why sites have not.
        """
        for part in (part for part in self.kept["parts"] if part.keys() & lost.keys()):
            wrong, lacks = part.keys() <= released, [(site, why) for site, why in gone.items() if site in part]
            why = "is wrong by one of them, nobody can say which; the group is out" if wrong else "lacks a site"
            text = f"the sum of its group, {list_names(part)}, {why}{f'. {reasons(lacks)}' if lacks else ''}"
            self.record.left_out += [LeftOut(site, TASK_MASK, text) for site in part if site in lost]
            self.journal.say(f"round {self.record.current_round}: {text}", warning=True)
            lost = {**lost, **dict.fromkeys(lost.keys() & part.keys(), text)}
            self.out |= {site: text for site in part if wrong}
        return dict(lost)

    def lose(self, lost: SumLost, *, last: bool) -> None:
        """Count a lost round; deal the sites to groups after :data:`PATIENCE` of them.

        Args:
            lost: why the sum is none.
            last: whether no round follows.

        Raises:
            RoundFailed: no round has got a sum, or the sites are too few for two groups.
        """
        self.kept |= {"lost": self.kept["lost"] + 1, "model": self._begun, "weights": {**self._before, **self._asked}}
        self.renew()
        *_, asked = self.kept["weights"].values()
        weights, due = asked["sites"] or dict.fromkeys(_sites(asked), 1.0), self.kept["lost"] >= PATIENCE
        parts = self.kept["parts"] or (draw_groups(self.run.experiment or self.ask.form["run"], weights) if due else [])
        few = (
            f". {PATIENCE} rounds are lost, and {len(weights)} sites make no two groups of {FEWEST} in which "
            "each has at most half of the weight, and of which one could go on alone. To find the site at fault, begin "
            f"other experiments, each without another site ({FEWEST} are needed)"
        ) * (due and not parts)
        need(self.kept["lost"] < self.run.rounds_in_all and (last or not few), RoundFailed(f"{lost}{few}"))
        self.kept["parts"] = parts
        groups = f". From now on sums are opened in groups: {'; '.join(map(list_names, parts))}" * bool(parts)
        text = f"the round is lost, and the model stays as it was: {lost}{groups}"
        self.journal.note(f"round {self.record.current_round}: {text}", warning=True)
        self.record.warnings = [*self.record.warnings, Warned("", "secure", 1.0, 0.0, text)]


def _sites(weights: Mapping[str, Any]) -> list[str]:
    return sorted(weights["sites"] or next(iter((weights["layers"] or {}).values())))


def _join_groups(done: Mapping[tuple[str, ...], Mapping[str, State]], question: SumAsked, layout: SumLayout) -> State:
    """Return the mean over all sites from the opened sums of one or several groups of sites."""
    sums = [tensors[question.label] for tensors in done.values()]
    shares = [np.array([question.table[site] for site in part]).sum(0) for part in done]  # by group and layer

    def make(name: str) -> torch.Tensor:
        return torch.stack([
            float(share[layout.columns[name]]) * means[name] for share, means in zip(shares, sums, strict=True)
        ]).sum(0)  # fmt: skip

    return sums[0] if len(sums) == 1 else Made(layout.shapes, make)


def _head_only(phase: Phase, site: str, message: Message) -> None:
    read_head(site, message, phase.current_round)


def _bytes_of(
    site: str, message: Message, current_round: int, known: set[str], most: int, *, all_of: bool = False
) -> dict[str, bytes]:
    """Return the checked bytes in a site's report, by name.

    Raises:
        ReportError: a name is not expected, or a value is not bytes of an allowed length (names site and field).
    """
    report = read_head(site, message, current_round).get("report")
    fields = dict(report) if isinstance(report, Mapping) else {}
    names = list_names([str(name)[:40] for name in fields], 5)
    refuse_if(site, {
        f"the report must have {list_names(known)}, got {names or 'nothing'}":
            not fields or not fields.keys() <= known or (all_of and fields.keys() != known),
        **{
            f"field {name!r} must be {'' if all_of else '1 to '}{most} bytes, got {value!r:.80}": True
            for name, value in fields.items()
            if not isinstance(value, bytes) or not (most if all_of else 1) <= len(value) <= most
        },
    })  # fmt: skip
    return fields
