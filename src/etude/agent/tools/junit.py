"""Parses pytest's report of a run (`--junitxml`) into the few facts that an agent is shown."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

from etude.sandbox.types import TestFailure

_MESSAGE_LINES = 2


@dataclass(frozen=True, slots=True)
class JunitReport:
    """One run of the repository's own tests."""

    num_passed: int
    num_skipped: int
    failed: tuple[TestFailure, ...]
    """Failures and errors, in the order in which they ran; named as pytest names tests."""


class _NoEntities(ElementTree.TreeBuilder):
    """Refuses a document that declares anything, in whatever encoding."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("a document type")


def parse_junit(data: bytes) -> JunitReport | None:
    """The report in a JUnit XML file; None if it is invalid. Never raises: an agent's tests may write there.

    Files that declare entities are invalid: pytest declares none, and expanding them may take for ever.
    """
    try:
        root = ElementTree.fromstring(data, ElementTree.XMLParser(target=_NoEntities()))
    except (ElementTree.ParseError, ValueError, LookupError):
        return None
    num_passed = num_skipped = 0
    failed: list[TestFailure] = []
    cases = list(root.iter("testcase"))
    if root.tag not in ("testsuites", "testsuite"):
        return None
    for case in cases:
        wrong = [entry for entry in case if entry.tag in ("failure", "error")]
        failed += [TestFailure(_name(case), _message(entry)) for entry in wrong]
        if not wrong:
            skipped = case.find("skipped") is not None
            num_skipped += skipped
            num_passed += not skipped
    return JunitReport(num_passed, num_skipped, tuple(failed))


def _name(case: ElementTree.Element) -> str:
    """`tests/test_a.py::TestX::test_y`; for a file that was not collected its path."""
    file, name = case.get("file"), case.get("name") or "?"
    places = (case.get("classname") or "").split(".")
    if not file:
        return "::".join(part for part in (".".join(places), name) if part)
    module = file.removesuffix(".py").replace("\\", "/").split("/")
    classes = places[len(module) :] if places[: len(module)] == module else []
    return "::".join([file, *classes, name])


def _message(wrong: ElementTree.Element) -> str:
    """The error in a line or two: pytest gives its own message first, the traceback after it."""
    text = wrong.get("message") or ""
    if text.startswith(("collection failure", "failed on")):
        text += "\n" + _error_lines(wrong.text or "")
    lines = [" ".join(line.split()) for line in text.split("\n") if line.strip()]
    return " ".join(lines[:_MESSAGE_LINES])


def _error_lines(text: str) -> str:
    """The lines of a traceback that pytest marks as the error."""
    marked = [line[1:].strip() for line in text.split("\n") if line.startswith("E ")]
    return " ".join(marked) if marked else text.strip().rpartition("\n")[2]
