"""Writes a task's instruction as a user would: the bug's symptom in one or two sentences, without its fix."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from etude.tasks.making.changes import Change, TestFailure
from etude.tasks.making.refactoring import write_request
from etude.tasks.making.source import Function, read_tree
from etude.tasks.making.symptoms import Call, Symptom, find_calls, find_symptom
from etude.tasks.making.tokens import changed_text, code_tokens, runs

RUN_LENGTH = 5
"""An instruction must not contain so many consecutive code tokens of the reference's difference."""
_MOST_SYMPTOMS = 3
_MOST_READ = 50
"""Most failing tests that are searched for symptoms."""
_MOST_NEEDED = 6
_MOST_TEXT = 160
_TEMPLATES = {
    "wrong value": (
        "`{call}` gives {seen}, but should give {wanted}.",
        "I expected {wanted} from `{call}` and got {seen}.",
        "`{call}` returns {seen}; right is {wanted}.",
        "Expected of `{call}`: {wanted}. Actual: {seen}.",
        "Why is `{call}` {seen}? It has to be {wanted}.",
    ),
    "untrue": (
        "`{call}` should hold, but does not.",
        "I rely on `{call}`, which no longer holds.",
        "`{call}` has to be true and is not.",
    ),
    "raises": (
        "`{call}` fails with {seen}.",
        "`{call}` ends in {seen}.",
        "I get {seen} from `{call}`.",
        "`{call}` raises {seen}, which it should not.",
    ),
    "not raised": (
        "`{call}` should raise {wanted}, but does not.",
        "No {wanted} from `{call}`, though one is due.",
        "`{call}` is accepted; {wanted} is what it has to raise.",
    ),
}
_SCRIPTS = {
    "wrong value": "This script should run through, but does not:",
    "untrue": "This script should run through, but does not:",
    "raises": "This script should run through, but fails with {seen}:",
    "not raised": "The last line of this script should raise {wanted}, but does not:",
}
_AFTER = ("After", "Having run", "With this:")
_OPENINGS = (
    "",
    "",
    "",
    "Bug report: ",
    "Something broke lately. ",
    "Please look into this: ",
    "Regression: ",
)
_CLOSINGS = (
    "",
    "",
    "",
    " Please fix it.",
    " Find the cause and repair it.",
    " The rest has to go on working.",
)
_DELETED = (
    "{what} not implemented yet. Write {it}.",
    "Implement {it}: {what} missing so far.",
    "{what} still to be written. Please add {it}.",
)
_Deletion = tuple[str, str, str | None]
"""Qualified name, docstring's first paragraph, and the parameters if the whole function was removed."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A task's instruction to the agent."""

    text: str
    names_every_call: bool = False
    """Whether it contains the call of each failing test, so that special-casing these calls earns 1."""


def write_instruction(
    change: Change,
    sources: Mapping[str, str],
    tests: Mapping[str, str],
    failures: Sequence[TestFailure],
    seed: int,
    groups: Sequence[Collection[str]] = (),
) -> Instruction | str:
    """The instruction of a task, deterministic by seed; or the reason why none can specify the task.

    `sources`: the project's own files, `tests`: the hidden ones, path -> text. `groups`: for each part of a
    combined change the ids of the tests that it fails by itself; each part gets a symptom of its own. The
    call of at least one failing test is left out, if another one can be given.
    """
    reference = _reference_runs(change, sources)
    if change.smell:
        return _check_text(Instruction(write_request(change, seed)), reference)
    rng = Random(f"instruction/{seed}/{change.id}")
    needed = find_needed(change, sources, tests, failures)
    private = [name for name in needed if name.startswith("_") and name.isidentifier()]
    if private:
        return f"underspecified: tests use the private name {private[0]}"
    if len(needed) > _MOST_NEEDED or any(len(text) > _MOST_TEXT for text in needed):
        return f"underspecified: tests need {len(needed)} names and texts that the workspace lacks"
    gone = _find_deletions(change, sources)
    if isinstance(gone, str):
        return gone
    deleted, is_past = _describe_deletions(gone, rng) if gone else "", change.kind == "past_change"
    sentences = [deleted] if deleted else []
    writer = _SymptomWriter(failures, tests, reference, rng)
    for group in [*groups] or [[failure.test for failure in failures]]:
        mine = [failure for failure in failures if failure.test in group]
        most = 1 if groups or (deleted and not is_past) else max(_MOST_SYMPTOMS, len(change.places))
        written = writer.describe(mine, sentences, most, not deleted)
        if not written and not deleted:
            return "underspecified: no failing test shows a symptom that may be described"
        sentences += written
    text = rng.choice(_OPENINGS) + " ".join(sentences)
    missing = [entry for entry in needed if entry not in text]
    names, wordings = [e for e in missing if e.isidentifier()], [e for e in missing if not e.isidentifier()]
    if names:
        text += f" Names: {', '.join(f'`{name}`' for name in names)}."
    if wordings:
        text += f" Wording: {', '.join(f'`{wording}`' for wording in wordings)}."
    text = re.sub(r"```\n +", "```\n\n", text + rng.choice(_CLOSINGS))
    return _check_text(Instruction(text, writer.names_every_call()), reference)


def _check_text(instruction: Instruction, reference: set[tuple[str, ...]]) -> Instruction | str:
    if reference & set(runs(_plain_tokens(instruction.text), RUN_LENGTH)):
        return "gives the solution away: the instruction has a run of tokens of the reference"
    return instruction


def find_refusal(change: Change, sources: Mapping[str, str]) -> str | None:
    """Why no instruction can be written for a change, whatever its tests; None if that is not known yet."""
    found = _find_deletions(change, sources)
    return found if isinstance(found, str) else None


def find_needed(
    change: Change, sources: Mapping[str, str], tests: Mapping[str, str], failures: Sequence[TestFailure]
) -> list[str]:
    """Names and strings of the reference's difference that failing tests use and the workspace lacks."""
    workspace = "\n".join({**sources, **change.files}.values())
    names = set(re.findall(r"\w+", workspace)) | {*dir(builtins), *keyword.kwlist}
    used = "\n".join(_failing_parts(tests, failures))
    plain = used.replace("\\", "")
    found = list[str]()
    for path, broken in change.files.items():
        _, added = changed_text(broken, sources[path])
        for token in code_tokens(added):
            if token.isidentifier() and token not in names and re.search(rf"\b{token}\b", used):
                found.append(token)
            elif token.endswith('"'):
                pieces = re.split(r"\{[^{}]*\}|\\n|\\", token[token.index('"') :].strip('"'))
                found += [
                    piece.strip()
                    for piece in pieces
                    if re.search(r"[^\W\d]{3}", piece) and piece not in workspace and piece.strip() in plain
                ]
    return list(dict.fromkeys(found))


def _failing_parts(tests: Mapping[str, str], failures: Sequence[TestFailure]) -> list[str]:
    """The source of the failing test functions and of the imports of their files."""
    parts = list[str]()
    for path in dict.fromkeys(failure.path for failure in failures):
        text = tests.get(path, "")
        tree, lines = read_tree(text), text.encode(errors="surrogatepass").splitlines(keepends=True)
        wanted = {failure.name.rpartition(".")[2] for failure in failures if failure.path == path}
        for node in ast.walk(tree) if tree is not None else ():
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            if is_import or (isinstance(node, Function) and node.name in wanted):
                parts.append(_segment(lines, node))
                parts += map(ast.unparse, getattr(node, "decorator_list", ()))
    return parts


def _segment(lines: Sequence[bytes], node: ast.stmt) -> str:
    """The text of a statement. `ast.get_source_segment` would split the whole file each time."""
    assert node.end_lineno is not None
    found = list(lines[node.lineno - 1 : node.end_lineno])
    found[-1] = found[-1][: node.end_col_offset]
    found[0] = found[0][node.col_offset :]
    return b"".join(found).decode(errors="surrogatepass")


def _reference_runs(change: Change, sources: Mapping[str, str]) -> set[tuple[str, ...]]:
    solved = change.solved(sources)
    both = "\n".join(
        text for path, broken in change.files.items() for text in changed_text(broken, solved[path])
    )
    return set(runs(_plain_tokens(both), RUN_LENGTH))


def _plain_tokens(text: str) -> list[str]:
    """Tokens without backticks and punctuation, as prose puts around code."""
    return [token for token in code_tokens(text.replace("`", " ")) if token not in ",.:;"]


class _SymptomWriter:
    """Writes sentences on failing tests, and records which of their calls an instruction contains."""

    def __init__(
        self,
        failures: Sequence[TestFailure],
        tests: Mapping[str, str],
        reference: set[tuple[str, ...]],
        rng: Random,
    ) -> None:
        self._calls = frozenset[Call]()
        self._failures, self._tests = failures, tests
        self._reference, self._rng = reference, rng
        self._symptoms: dict[str, Symptom | None] = {}

    def _find(self, failure: TestFailure) -> Symptom | None:
        """The failure's symptom, cached."""
        if failure.test not in self._symptoms:
            self._symptoms[failure.test] = find_symptom(failure, self._tests)
        return self._symptoms[failure.test]

    def names_every_call(self, calls: frozenset[Call] = frozenset()) -> bool:
        """Whether these and the recorded calls include those of every failing test. A test without a symptom
        has none."""
        calls |= self._calls
        found = map(self._find, self._failures)
        return all(symptom is not None and find_calls(symptom) <= calls for symptom in found)

    def describe(
        self, failures: Sequence[TestFailure], earlier: Sequence[str], most: int, must_describe: bool
    ) -> list[str]:
        """Sentences on up to `most` failures with different subjects, whose calls are recorded. A sentence
        with the last unrecorded call is left out, unless it is the only one and `must_describe`."""
        found, last = dict[str, str](), dict[str, frozenset[Call]]()
        order = sorted(failures, key=lambda failure: (len(failure.message), failure.test))
        for failure in order[:_MOST_READ]:
            symptom = self._find(failure)
            if symptom is None or symptom.subject in found:
                continue
            sentence = _write_sentence(symptom, self._rng)
            shared = self._reference & set(runs(_plain_tokens(sentence), RUN_LENGTH))
            if shared or sentence in earlier or re.search(r"`_\w|\b_[a-z]\w+|\._\w", sentence) is not None:
                continue
            calls = find_calls(symptom)
            if self.names_every_call(calls):
                last.setdefault(sentence, calls)
                continue
            found[symptom.subject], self._calls = sentence, self._calls | calls
            if len(found) == most:
                break
        if must_describe and not found and last:
            sentence, calls = next(iter(last.items()))
            self._calls |= calls
            return [sentence]
        return list(found.values())


def _write_sentence(symptom: Symptom, rng: Random) -> str:
    values = {"call": symptom.call, "seen": symptom.seen, "wanted": symptom.wanted}
    if symptom.is_statement:
        code = "\n".join(filter(None, [symptom.script, symptom.call]))
        return f"{_SCRIPTS[symptom.kind].format(**values)}\n\n```python\n{code}\n```\n"
    sentence = rng.choice(_TEMPLATES[symptom.kind]).format(**values)
    if not symptom.script:
        return sentence
    return f"{rng.choice(_AFTER)}\n\n```python\n{symptom.script}\n```\n\n{sentence}"


def _find_deletions(change: Change, sources: Mapping[str, str]) -> list[_Deletion] | str:
    """The deletions that an instruction may mention; or why they are not specified."""
    if change.kind not in ("deleted_feature", "past_change"):
        return []
    gone = [found for path, text in change.files.items() for found in _deleted(text, sources[path])]
    public = [entry for entry in gone if not re.search(r"(^|\.)_[^_]", entry[0])]
    special = [name for name, _, _ in public if name.endswith("__")]
    if change.kind == "past_change":
        return [entry for entry in public if entry[1] and entry[2] is not None and entry[0] not in special]
    if not gone:
        return "underspecified: no function is gone"
    if len(special) == len(public):
        return "underspecified: nothing public is gone"
    if any(not doc for name, doc, _ in public if name not in special):
        return "underspecified: what is gone has no docstring"
    return public


def _describe_deletions(gone: Sequence[_Deletion], rng: Random) -> str:
    """A text with the deleted names and their docstrings."""
    names = [f"`{name}`" for name, _, _ in gone]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    what, it = (f"{listed} is", "it") if len(names) == 1 else (f"{listed} are", "them")
    text = rng.choice(_DELETED).format(what=what, it=it)
    for name, doc, arguments in gone:
        text += f" `{name}` takes {arguments}: {doc}" if arguments is not None else ""
    return text


def _deleted(broken: str, own: str) -> list[_Deletion]:
    now, was = _functions(read_tree(broken)), _functions(read_tree(own))
    found = list[_Deletion]()
    for name, node in was.items():
        doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if name not in now:
            arguments = [entry.arg for entry in [*node.args.posonlyargs, *node.args.args]]
            arguments += [f"{entry.arg} (by keyword)" for entry in node.args.kwonlyargs]
            arguments = [entry for entry in arguments if entry not in ("self", "cls")]
            found.append((name, doc, " and ".join(arguments) or "no arguments"))
        elif ast.dump(now[name]) != ast.dump(node) and "." not in name.replace(".", "", 1):
            found.append((name, doc, None))
    return found


def _functions(tree: ast.Module | None) -> dict[str, Function]:
    found = dict[str, Function]()
    for node in tree.body if tree is not None else ():
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for entry in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(entry, Function):
                found[f"{prefix}{entry.name}"] = entry
    return found
