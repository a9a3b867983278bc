"""Families of small functions, all in one controlled English (see `language`)."""

from etude_quickstart.families import aggregates, arithmetic, branches, dictionaries, lists, searches, strings
from etude_quickstart.families.callers import HELPER, draw_caller
from etude_quickstart.families.shape import PARAMETERS, Family, Kind, Result, Shape

FAMILIES: tuple[Family, ...] = (
    *arithmetic.FAMILIES,
    *branches.FAMILIES,
    *aggregates.FAMILIES,
    *searches.FAMILIES,
    *lists.FAMILIES,
    *strings.FAMILIES,
    *dictionaries.FAMILIES,
)
"""Families of the splits train, validation and heldout."""

HELD_OUT_FAMILIES: tuple[Family, ...] = (*aggregates.HELD_OUT, *searches.HELD_OUT)
"""Families of the split heldout_family, built from constructs that also occur in the others."""

__all__ = [
    "FAMILIES",
    "HELD_OUT_FAMILIES",
    "HELPER",
    "PARAMETERS",
    "Family",
    "Kind",
    "Result",
    "Shape",
    "draw_caller",
]
