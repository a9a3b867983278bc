"""Combined changes: two or three of different functions at once, of several files where there are some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from random import Random

from etude.tasks.making.changes import OPERATOR_JOIN, Change, split_of
from etude.tasks.making.source import read_tree
from etude.tasks.making.tokens import changed_lines

_SHARE_OF_THREE = 0.2
_MOST_USES = 3


def combine(changes: Sequence[Change], sources: Mapping[str, str], seed: int) -> Iterator[Change]:
    """Pairs, and now and then triples, each part of another function and operator, all of one split.

    Files of their own first. Each change is used three times at most. The parts' ids are in `parts`.
    """
    rng = Random(f"combinations/{seed}")
    order = list(changes)
    rng.shuffle(order)
    pairs = list(combinations(range(len(order)), 2)) if len(order) <= 1500 else []
    pairs = pairs or [tuple(rng.sample(range(len(order)), 2)) for _ in range(500_000)]
    rng.shuffle(pairs)
    pairs.sort(key=lambda pair: order[pair[0]].files.keys() == order[pair[1]].files.keys())
    uses = Counter[int]()
    for pair in pairs:
        parts = list(pair)
        if rng.random() < _SHARE_OF_THREE:
            parts.append(rng.randrange(len(order)))
        chosen = [order[part] for part in parts]
        if any(uses[part] >= _MOST_USES for part in parts) or not _fit(chosen):
            continue
        files = _merge(chosen, sources)
        if files is not None:
            uses.update(parts)
            yield Change(
                "combined",
                OPERATOR_JOIN.join(change.operator for change in chosen),
                files,
                tuple(place for change in chosen for place in change.places),
                parts=tuple(change.id for change in chosen),
            )


def _fit(parts: Sequence[Change]) -> bool:
    places = [(place.path, place.name) for part in parts for place in part.places]
    operators = {part.operator for part in parts}
    splits = {split_of(path) for part in parts for path in part.files}
    return len(set(places)) == len(places) and len(operators) == len(parts) and len(splits) == 1


def _merge(parts: Sequence[Change], sources: Mapping[str, str]) -> dict[str, str] | None:
    """All the parts' edits of the project's own text; None where they touch or make no Python together."""
    files = dict[str, str]()
    for path in sorted({path for part in parts for path in part.files}):
        edits = [
            (two, part.files[path].split("\n")[slice(*one)])
            for part in parts
            if path in part.files
            for one, two in changed_lines(part.files[path], sources[path])
        ]
        edits.sort(key=lambda edit: edit[0])
        if any(one[0][1] >= two[0][0] for one, two in pairwise(edits)):
            return None
        lines = sources[path].split("\n")
        for (first, last), text in reversed(edits):
            lines[first:last] = text
        files[path] = "\n".join(lines)
        if read_tree(files[path]) is None:
            return None
    return files
