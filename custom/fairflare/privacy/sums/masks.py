"""Describe a secure sum, make masks that fit this sum only, mask a site's numbers, and add masked numbers up."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from pydantic import TypeAdapter

from fairflare.base.checks import refuse
from fairflare.base.settings import Fraction
from fairflare.core.states import Made, State
from fairflare.exchange.sent_tensors import fingerprint
from fairflare.privacy.sums.keys import MAGIC, SIZE, Pairs, SumRefused, derive_key, fields, need
from fairflare.privacy.sums.ring import BLOCK, Ring, SumLayout, Words

Table = Mapping[str, tuple[float, ...]]  # weights by site, in each layer that has its own

#: Labels of the sums that a server can ask for, and the vectors that each sum adds up: two labels of the same vectors
#: are two sums of them. With labels of its own choice the server could ask for the same numbers many times.
NORMS, CLASS_GRADIENTS, GROUPS, COUNTS = "norms", "class_gradients", "groups", "counts"
MEANS = {"params": "params", "anchor": "params", "buffers": "buffers", "anchor_buffers": "buffers"} | {
    label: label for label in (NORMS, CLASS_GRADIENTS, GROUPS, COUNTS)
}
BY_PART = {CLASS_GRADIENTS: "class", GROUPS: "group"}  # sums of parts that not every site has; value: what a part is
FIRST_OF_TWO = ("anchor", "anchor_buffers")

SLICES = TypeAdapter(list[tuple[str, Literal[0, 1], list[dict[str, Fraction] | None]]])
_ZEROS = memoryview(bytes(8 * BLOCK))


class SumSpoiled(ValueError):
    """Report an opened sum with impossible values: some site, not known which, used wrong keys, weights or numbers."""


@dataclass(frozen=True)
class SumAsked:
    """Describe the sum that the server asks for; masks cancel only if all sites were asked for the same sum.

    Attributes:
        round, attempt: numbers from 0.
        label: one of ``MEANS``.
        ring: how numbers become integers.
        model: digest of what the sites received.
        table: weights of every member in each layer.
        slices: in JSON, for each tensor of which some slices have weights of their own, its name, the axis along which
            the slices lie, and by slice the sites' weights; null: those of its layer. A site that is not named has 0.
    """

    round: int
    attempt: int
    label: str
    ring: Ring
    model: bytes
    table: Table
    slices: str = ""

    def __post_init__(self) -> None:
        fits = {
            **{
                name: type(value := getattr(self, name)) is int and 0 <= value < 1 << 32
                for name in ("round", "attempt")
            },
            "label": self.label in MEANS,
            "model": isinstance(self.model, bytes) and len(self.model) == SIZE,
            "table": _is_table(self.table),
            "slices": isinstance(self.slices, str)
            and all(weights.keys() <= self.table.keys() for weights in self.own_weights),
        }
        refuse({
            f"field {name!r} of a question for a sum is {getattr(self, name)!r:.80}": not good
            for name, good in fits.items()
        })  # fmt: skip
        _ = self.limit

    @property
    def members(self) -> list[str]:
        """Return the names of the sites whose numbers a secure sum adds up, sorted."""
        return sorted(self.table)

    @property
    def partial(self) -> Sequence[tuple[str, int, list[dict[str, float] | None]]]:
        """Return what ``slices`` says."""
        return SLICES.validate_json(self.slices or "[]")

    @property
    def own_weights(self) -> list[dict[str, float]]:
        """Return the weights by site of each slice that has its own."""
        return [weights for _, _, by_slice in self.partial for weights in by_slice if weights is not None]

    @property
    def vectors(self) -> str:
        """Return which of the sites' vectors the sum adds up; sums of the same name here add up the same vectors."""
        return MEANS[self.label]

    @property
    def limit(self) -> int:
        """Return the largest absolute value of an integer in the sum; refuse a ring in which it could wrap around."""
        return self.ring.limit(len(self.table))

    def plain(self) -> dict[str, Any]:
        """Return this question for a sum as numbers, texts, bytes, lists and dicts, to be sent in a message."""
        return {
            **vars(self), "ring": list(astuple(self.ring)),
            "table": {site: list(row) for site, row in self.table.items()},
        }  # fmt: skip

    @classmethod
    def read(cls, site: str, plain: Any) -> SumAsked:
        """Return the sum that the server's message asks a site for.

        Raises:
            SumRefused: a part of the message is missing or invalid; the text names it.
        """
        fields, field = dict[str, Any](), "ring"
        try:
            fields |= plain
            fields[field] = Ring(*fields.get(field, ()))
            field = "table"
            fields[field] = {name: tuple(row) for name, row in fields.get(field, ()).items()}
            return cls(**fields)
        except (AttributeError, TypeError, ValueError) as error:
            raise SumRefused(
                site,
                f"the server's question cannot be read ({error!s:.200}; field {field!r}: {fields.get(field)!r:.80}); "
                "use the same version at server and sites",
            ) from error

    def context(self) -> bytes:
        """Return the digest of the whole question for a sum, from which the masks are made."""
        number, bound = struct.Struct("<I").pack, struct.pack("<d", self.ring.bound)
        asked = (number(self.round), number(self.attempt), self.label.encode())
        ring = (number(self.ring.bits), number(self.ring.fraction), bound)
        slices = [self.slices.encode()] if self.slices else []
        return hashlib.sha256(
            fields(MAGIC, b"sum", *asked, *ring, self.model, pack_table(self.table), *slices)
        ).digest()

    def weigh_update(
        self, site: str, layout: SumLayout, update: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return a site's numbers, to be multiplied by the layers' weights, such that slices get their own weights."""
        weighed = dict(update)
        for name, axis, by_slice in self.partial:
            tensor = weighed[name] = update[name].clone() if name in update else torch.empty(0)
            need(tensor.shape[axis : axis + 1] == (len(by_slice),), SumRefused(
                site, f"field 'slices' has {len(by_slice)} of {name!r}, its model {tuple(tensor.shape)}; use one model",
            ))  # fmt: skip
            of_layer = self.table[site][layout.columns[name]]
            for number, share in enumerate(by_slice):
                if share is not None:
                    tensor.select(axis, number).mul_(share.get(site, 0.0) / of_layer if of_layer else 0.0)
        return weighed


def _is_table(table: Table) -> bool:
    """Return whether a table maps names of sites to weights, equally many for each site."""
    return (
        all(isinstance(name, str) and name.isprintable() for name in table)
        and all(isinstance(weight, float) for row in table.values() for weight in row)
        and len({len(row) for row in table.values()}) == 1
        and all(table.values())
    )


def pack_table(table: Table) -> bytes:
    """Return the table of the sites' weights in a secure sum as bytes."""
    rows = ((site.encode(), struct.pack(f"<{len(row)}d", *row)) for site, row in sorted(table.items()))
    return fields(*(part for row in rows for part in row))


def digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the SHA-256 of tensors: names, types, shapes and numbers, sorted by name."""
    return bytes.fromhex(fingerprint(tensors))


class Masks:
    """Add masks to numbers block by block: the words of ChaCha20 under each key; a key serves for one vector.

    Args:
        added, taken: keys of the masks that are added, and of those that are subtracted.
    """

    def __init__(self, added: Iterable[bytes], taken: Iterable[bytes]) -> None:
        signed = [*((np.add, key) for key in added), *((np.subtract, key) for key in taken)]
        self._streams = [(sign, Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()) for sign, key in signed]

    def put_on(self, block: Words) -> None:
        """Add the masks, in place, to ``block``, the next part of a vector (at most as many bytes as ``_ZEROS``)."""
        for sign, stream in self._streams:
            sign(block, np.frombuffer(stream.update(_ZEROS[: block.nbytes]), block.dtype), out=block)


def own_key(question: SumAsked, pairs: Pairs) -> bytes:
    """Return the key of a site's own mask for a sum; the site gives it away when all members' vectors have arrived."""
    return derive_key(pairs.own, question.context(), b"own")


def masks_of(question: SumAsked, pairs: Pairs) -> Masks:
    """Return a site's masks for a sum: its own, and one for each other member; those of members cancel in the sum."""
    context = question.context()
    keys = {name: derive_key(pairs.keys[name], context, b"mask") for name in question.members if name != pairs.site}
    added = [own_key(question, pairs), *(key for name, key in keys.items() if pairs.site < name)]
    return Masks(added, [key for name, key in keys.items() if pairs.site > name])


class Addition:
    """Add up the masked vectors that the sites send for a sum, at the server; one vector is in memory at a time.

    Args:
        question: the sum that was asked for.
        layout: how the tensors follow each other in the vector.
    """

    def __init__(self, question: SumAsked, layout: SumLayout) -> None:
        self.question, self.layout = question, layout
        self.missing = set(question.table)
        self._total: Words = np.zeros(layout.numbers, question.ring.words)

    def add(self, site: str, vector: Any) -> None:
        """Add a site's masked vector to the sum.

        Raises:
            ValueError: the vector is no tensor of this ring and length, or the site is no member or has sent a vector
                already.
        """
        where, ring = f"site {site!r}: field {self.question.label!r}", self.question.ring
        like = f"torch.int{ring.bits} ({self.layout.numbers},)"
        had = f"{vector.dtype} {tuple(vector.shape)}" if isinstance(vector, torch.Tensor) else type(vector).__name__
        refuse({
            f"{where} is not expected, or came already; ask members once": site not in self.missing,
            f"{where} must be {like}, got {had}; take filters that change numbers out there": had != like,
        })  # fmt: skip
        words = vector.numpy().view(ring.words)
        for start in range(0, len(words), BLOCK):
            self._total[start : start + BLOCK] += words[start : start + BLOCK]
        self.missing.remove(site)

    def open_sum(self, shares: Mapping[str, bytes]) -> Made:
        """Remove the sites' own masks, and return the opened sum, made in float64 at access; call this once.

        Args:
            shares: the key of every member's own mask.

        Raises:
            ValueError: a vector is missing; the text names the site.
            SumSpoiled: a number lies outside the range that such a sum can have.
        """
        ring, limit, label = self.question.ring, self.question.limit, self.question.label
        need(not self.missing, ValueError(f"no vector from {sorted(self.missing)} for {label!r}; ask them, or anew"))
        masks, outside = Masks([], [shares[site] for site in self.question.members]), 0
        for start in range(0, len(self._total), BLOCK):
            part = self._total[start : start + BLOCK]
            masks.put_on(part)
            signed = part.view(f"<i{ring.bits // 8}")
            outside += int(np.count_nonzero((signed > limit) | (signed < -limit)))
        need(not outside, SumSpoiled(
            f"{outside} of {len(self._total)} numbers of the sum {label!r} (round {self.question.round}) lie outside "
            f"[-{ring.bound:g}, {ring.bound:g}]: a site was asked for another sum or has other keys, nobody can say "
            "which; ask for keys again",
        ))  # fmt: skip
        shapes = self.layout.shapes
        starts = dict(zip(shapes, np.cumsum([0, *map(math.prod, shapes.values())]).tolist(), strict=False))

        def make(name: str) -> torch.Tensor:
            part = self._total[starts[name] : starts[name] + math.prod(shapes[name])]
            return torch.from_numpy(part.view(f"<i{ring.bits // 8}") * 2.0**-ring.fraction).reshape(shapes[name])

        return Made(shapes, make)


def additions_for(asked: Sequence[tuple[SumAsked, SumLayout]], part: Mapping[str, float] | None) -> dict[str, Addition]:
    """Return an addition for each question; ``part``: weights of a group's sites, in place of the question's table."""
    return {
        question.label: Addition(question if part is None else replace(question, table={
            site: (weight,) * len(question.table[site]) for site, weight in part.items()
        }), layout)
        for question, layout in asked
    }  # fmt: skip


def open_sums(totals: Mapping[str, Addition], keys: Mapping[str, Mapping[str, bytes]]) -> dict[str, State]:
    """Return the opened sums of a group of sites; ``keys``: of each site, the key of its own mask by sum."""
    return {
        label: total.open_sum({site: by_label[label] for site, by_label in keys.items()})
        for label, total in totals.items()
    }
