"""Choose the pictures at the top of a comparison's page: on sites, on groups of people, on unseen hospitals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fairflare_lab.page import unseen
from fairflare_lab.page.content import Lead, Picture, Section
from fairflare_lab.page.groups import OF_GROUPS, first_run
from fairflare_lab.page.material import Material


def leads(material: Material, sections: Sequence[Section]) -> tuple[list[Lead], list[Section]]:
    """Return the pictures at a page's top (leads), and the page's sections without these pictures.

    A topic without results has no lead.

    Args:
        material: material of a comparison; with the material of a single run there are no leads.
        sections: sections of the page.
    """
    found: list[Lead] = []
    pictures = {part.name: part for section in sections for part in section.parts if isinstance(part, Picture)}
    if material.reference and "sites" in pictures:
        found.append(Lead("Between sites.", pictures["sites"], "results"))
    people = [picture for name, picture in pictures.items() if name.startswith(OF_GROUPS)]
    if material.reference and people:
        found.append(Lead(f"Between groups of people, {first_run(material).name}.", people[0], "groups"))
    if material.unseen is not None:
        found.append(unseen.lead(material.unseen))
    taken = [one.picture for one in found]
    return found, [replace(s, parts=[part for part in s.parts if part not in taken]) for s in sections]
