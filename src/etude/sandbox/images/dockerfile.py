"""Dockerfiles: read into stages and instructions, each with its line. Nothing is run here.

Raises TemplateError for everything that the builder would not do as Docker does, before anything is built.
What is supported stands in docs/images.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.words import split_words

MAX_TEXT_CHARS = 256 << 10
MAX_INSTRUCTIONS = 1000
MAX_FLAGS = 50
DOCKER_FIX = "leave it out, or build the image with the docker backend and import it"

BUILDING = ("ADD", "ARG", "COPY", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR")
IGNORED = {
    "CMD": "sandboxes start no command of the image",
    "ENTRYPOINT": "sandboxes start no command of the image",
    "EXPOSE": "",
    "HEALTHCHECK": "sandboxes start no command of the image",
    "LABEL": "",
    "MAINTAINER": "",
    "STOPSIGNAL": "",
    "VOLUME": "the directory is part of the sandbox's disk",
}
"""Instructions that change nothing in a sandbox, and what the user should know of that, if anything."""
_FLAGS = {
    "ADD": ("chown", "chmod", "link"),
    "COPY": ("chown", "chmod", "from", "link"),
    "FROM": ("platform",),
    "RUN": ("mount", "network"),
}
_EXPANDED = ("ADD", "ARG", "COPY", "ENV", "FROM", "USER", "WORKDIR")
_DIRECTIVE = re.compile(r"#[ \t]*([a-zA-Z]+)[ \t]*=[ \t]*(\S{1,200})[ \t]*\Z")
_HEREDOC = re.compile(r"(?:^|[ \t])[0-9]*<<-?[\"']?[A-Za-z_]")
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]*\Z")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, continuation lines joined."""

    line: int
    """Where it begins, from 1."""
    keyword: str
    flags: tuple[tuple[str, str], ...]
    """`--name=value`, in order."""
    text: str
    """All after the flags."""
    words: tuple[str, ...] | None
    """The JSON form's words; None for the shell form."""
    source: str
    """Name of the file."""

    def error(self, message: str, received: object = None, fix: str | None = None) -> TemplateError:
        """The error for this instruction."""
        return TemplateError(
            message, field=f"{self.source}, line {self.line}: {self.keyword}", received=received, fix=fix
        )

    def flag(self, name: str) -> str | None:
        """The last value of a flag."""
        return dict(self.flags).get(name)


@dataclass(frozen=True, slots=True)
class Stage:
    """From one FROM to the next."""

    base: str
    """What FROM names, variables not yet expanded."""
    name: str | None
    start: Instruction
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A parsed file."""

    name: str
    escape: str
    arguments: tuple[Instruction, ...]
    """ARGs before the first FROM."""
    stages: tuple[Stage, ...]


def parse_dockerfile(text: str, name: str = "Dockerfile") -> Dockerfile:
    """Parses a Dockerfile. Linear in its length. Raises TemplateError with file, line and instruction."""
    if len(text) > MAX_TEXT_CHARS:
        raise TemplateError("is too long", field=name, received=f"{len(text)} characters")
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    escape = _escape_character(lines, name)
    arguments: list[Instruction] = []
    stages: list[tuple[Instruction, list[Instruction]]] = []
    for count, (number, joined) in enumerate(_logical_lines(lines, escape), 1):
        instruction = _instruction(number, joined, name, escape)
        if count > MAX_INSTRUCTIONS:
            raise instruction.error(f"more than {MAX_INSTRUCTIONS} instructions")
        if instruction.keyword == "FROM":
            stages.append((instruction, []))
        elif stages:
            stages[-1][1].append(instruction)
        elif instruction.keyword == "ARG":
            arguments.append(instruction)
        else:
            raise instruction.error("nothing but ARG may come before FROM", fix="begin with FROM")
    if not stages:
        raise TemplateError("has no FROM", field=name, fix="begin with FROM and a base image")
    return Dockerfile(name, escape, tuple(arguments), tuple(_stage(*stage) for stage in stages))


def _escape_character(lines: list[str], name: str) -> str:
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.match(line.strip()) if line.startswith("#") else None
        if match is None:
            break
        if match[1].lower() == "escape":
            if match[2] not in ("\\", "`"):
                raise TemplateError(
                    "the escape character is \\ or `", field=f"{name}, line {number}", received=match[2]
                )
            return match[2]
    return "\\"


def _logical_lines(lines: list[str], escape: str) -> Iterator[tuple[int, str]]:
    """Instructions with the numbers of their first lines; comments and empty lines are dropped."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue  # within a continued instruction, too
        first = first if parts else number
        end = line.rstrip()
        if end.endswith(escape) and not end.endswith(escape * 2):
            parts.append(end[:-1])
            continue
        yield first, "".join([*parts, line]).strip()
        parts = []
    if parts:
        yield first, "".join(parts).strip()


def _instruction(line: int, joined: str, source: str, escape: str) -> Instruction:
    pieces = joined.split(None, 1)
    keyword = pieces[0].upper() if pieces else ""
    bare = Instruction(line, keyword[:40], (), pieces[1] if len(pieces) > 1 else "", None, source)
    if keyword not in BUILDING and keyword not in IGNORED:
        raise bare.error(
            "this instruction is not supported",
            joined[:80],
            f"supported: {', '.join(BUILDING)}; {DOCKER_FIX}",
        )
    if "\0" in joined:
        raise bare.error("a NUL character")
    flags, text = _flags(bare)
    try:
        words = _json_words(text)
    except TemplateError as error:
        raise bare.error(error.message, error.received) from error
    instruction = Instruction(line, keyword, flags, text, words, source)
    if not text and keyword in BUILDING:
        raise instruction.error("needs an argument")
    _check_form(instruction)
    if keyword in _EXPANDED and instruction.words is None:
        try:
            split_words(text, {}, escape)
        except TemplateError as error:
            raise instruction.error(error.message, error.received, error.fix) from error
    return instruction


def _flags(instruction: Instruction) -> tuple[tuple[tuple[str, str], ...], str]:
    known = _FLAGS.get(instruction.keyword)
    text = instruction.text
    flags: list[tuple[str, str]] = []
    if known is None:
        return (), text
    while text.startswith("--"):
        word, *rest = text.split(None, 1)
        text = rest[0] if rest else ""
        name, _, value = word[2:].partition("=")
        if name not in known:
            raise instruction.error("this option is not supported", word[:80], DOCKER_FIX)
        flags.append((name, value))
        if len(flags) > MAX_FLAGS:
            raise instruction.error(f"more than {MAX_FLAGS} options")
    return tuple(flags), text


def _json_words(text: str) -> tuple[str, ...] | None:
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return None  # as Docker: then it is a shell command
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    if any("\0" in word or not _is_text(word) for word in words):
        raise TemplateError("a word that is no text", received=text[:80])
    return tuple(words)


def _is_text(word: str) -> bool:
    """JSON can spell halves of characters, which nothing can encode."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_form(instruction: Instruction) -> None:
    keyword, words = instruction.keyword, instruction.words
    if keyword in ("RUN", "COPY", "ADD") and words is None and _HEREDOC.search(instruction.text):
        raise instruction.error(
            "here-documents are not supported", instruction.text[:80],
            "put the text into a file of the build context and COPY it",
        )  # fmt: skip
    if keyword == "SHELL" and not words:
        raise instruction.error("must be a JSON list of words", instruction.text[:80], '["/bin/sh", "-c"]')
    if keyword == "RUN" and words == ():
        raise instruction.error("names no command")
    for name, value in instruction.flags:
        if name == "mount" and "type=cache" not in value.split(","):
            raise instruction.error("only mounts of type=cache are known, and ignored", value, DOCKER_FIX)
        if name == "network" and value != "default":
            raise instruction.error("networks cannot be chosen here", value, DOCKER_FIX)


def _stage(start: Instruction, instructions: list[Instruction]) -> Stage:
    words = start.text.split()
    name = None
    if len(words) == 3 and words[1].lower() == "as":
        name = words[2].lower()
        if not _STAGE_NAME.match(name):
            raise start.error("is no name for a stage", words[2], "letters, digits, _, - and .")
    elif len(words) != 1:
        raise start.error("does not parse", start.text[:80], "FROM image, or FROM image AS name")
    return Stage(words[0], name, start, tuple(instructions))
