"""With which sentences a comparison's page begins: between sites, between groups of people, at unseen hospitals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fairflare_lab.compare.group_gaps import gap_lead
from fairflare_lab.page import unseen
from fairflare_lab.page.content import Lead, Picture, Section
from fairflare_lab.page.groups import OF_GROUPS
from fairflare_lab.page.material import Material
from fairflare_lab.page.words import answer


def leads(material: Material, sections: Sequence[Section]) -> tuple[list[Lead], list[Section]]:
    """The leads, and the sections without the pictures that stand there.

    What there is no document of has no lead and no word.

    Args:
        material: of a comparison; of one run there are no leads.
        sections: of the page.
    """
    if not material.reference:
        return [], list(sections)
    found = []
    pictures = [part for section in sections for part in section.parts if isinstance(part, Picture)]
    picture = next((part for part in pictures if part.name == "sites"), None)
    if picture is not None:
        text = answer(material)
        found.append(Lead(f"Between sites: {text[0].lower()}{text[1:]}", picture, "results"))
    picture = next((part for part in pictures if part.name.startswith(OF_GROUPS)), None)
    if picture is not None:
        rows = {row.label: [one.document for one in row.runs] for row in material.rows}
        found.append(Lead(f"Between groups of people: {gap_lead(rows, material.reference)}", picture, "groups"))
    if material.unseen is not None:
        found.append(unseen.lead(material.unseen))
    taken = {id(one.picture) for one in found}
    rest = [replace(s, parts=[part for part in s.parts if id(part) not in taken]) for s in sections]
    return found, rest
