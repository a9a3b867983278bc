"""Planted bugs (mutations): all edits of all operators, in an order that varies operators and functions.

An edit replaces some characters of a file. A candidate is dropped unless its statement still parses, to a
different tree. Combined changes join two or three of different functions, preferably of different files.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from random import Random

from etude.tasks.making.changes import OPERATOR_JOIN, Change, round_robin, split_of, unique_changes
from etude.tasks.making.expressions import EXPRESSION_RULES
from etude.tasks.making.source import Edit, Scope, Source, apply_edits, read_sources, read_tree
from etude.tasks.making.statements import STATEMENT_RULES
from etude.tasks.making.tokens import changed_lines, code_tokens

RULES = (*EXPRESSION_RULES, *STATEMENT_RULES)
_ONLY_FOR_TYPES = re.compile(r"if (typing\.)?TYPE_CHECKING|if __name__ ==|__all__|__slots__|__version__")
_SHARE_OF_THREE = 0.2
_MOST_USES = 3


@dataclass(frozen=True, slots=True)
class _Candidate:
    operator: str
    source: Source
    edits: tuple[Edit, ...]
    around: tuple[int, int]
    """Offsets of the top-level statement that contains the edits."""
    scope: str

    def change(self) -> Change | None:
        """The change; None if the edits do not change the code, or leave invalid Python."""
        first, last = self.around
        old = self.source.text[first:last]
        new = apply_edits(old, [Edit(edit.start - first, edit.end - first, edit.text) for edit in self.edits])
        edited = [(self.source.text[edit.start : edit.end], edit.text) for edit in self.edits]
        if all(_tokens(old) == _tokens(new) for old, new in edited) or read_tree(new) is None:
            return None
        path, place = self.source.path, self.source.place(self.edits)
        text = self.source.text[:first] + new + self.source.text[last:]
        return Change("planted_bug", self.operator, {path: text}, (place,))


def _tokens(text: str) -> list[str]:
    """The tokens without parentheses: if they differ, so do the trees."""
    return [token for token in code_tokens(text) if token not in "()"]


def plan_bugs(sources: Mapping[str, str], seed: int) -> Iterator[Change]:
    """Every planted bug of a project, deterministic by seed, round-robin over operators and functions.

    `sources`: path -> text; tests and packaging among them are skipped. Yields each text once.
    """
    rng = Random(f"bugs/{seed}")
    by_operator: dict[str, list[_Candidate]] = {}
    for source in read_sources(sources):
        for candidate in _candidates(source):
            by_operator.setdefault(candidate.operator, []).append(candidate)
    queues = [_shuffle(by_operator[operator], rng) for operator in sorted(by_operator)]
    yield from unique_changes(candidate.change() for candidate in round_robin(queues))


def _shuffle(candidates: list[_Candidate], rng: Random) -> list[_Candidate]:
    """Random order, but the first of each function before the second of any."""
    rng.shuffle(candidates)
    count = Counter[tuple[str, str]]()

    def rank(candidate: _Candidate) -> int:
        count[candidate.source.path, candidate.scope] += 1
        return count[candidate.source.path, candidate.scope]

    return sorted(candidates, key=rank)


def _candidates(source: Source) -> Iterator[_Candidate]:
    for statement in source.tree.body:
        span = source.own_lines(statement, statement)
        text = source.segment(statement)
        if span is None or isinstance(statement, ast.Import | ast.ImportFrom) or _ONLY_FOR_TYPES.match(text):
            continue
        first, last = span
        for node, scope in _nodes(statement, ""):
            for rule in RULES:
                for operator, planned in rule(source, node):
                    edits = tuple(one for one in planned if one and first <= one.start and one.end <= last)
                    if len(edits) == len(planned):
                        yield _Candidate(operator, source, edits, span, scope)


def _nodes(node: ast.AST, scope: str) -> Iterator[tuple[ast.AST, str]]:
    """Executed nodes with the name of their function; without annotations and parts of f-strings."""
    if isinstance(node, Scope):
        scope = f"{scope}.{node.name}"
        if any("overload" in ast.dump(decorator) for decorator in node.decorator_list):
            return
    yield node, scope
    if isinstance(node, ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, scope)


def combine(changes: Sequence[Change], sources: Mapping[str, str], seed: int) -> Iterator[Change]:
    """Pairs and sometimes triples of changes, of different functions and operators within one split.

    Those of different files come first. Each change is used three times at most. `parts` has the parts' ids.
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
    """Applies the edits of all parts to the project's text; None if they touch or give invalid Python."""
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
