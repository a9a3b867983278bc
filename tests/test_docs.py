"""README and docs: links resolve, commands have the options shown, and the language is plain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from etude.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PRIVATE_WORDS = re.compile(
    r"\b(told|whoever|mend(s|ed|ing)?|is had|makings|hears? of|heard of)\b", re.IGNORECASE
)


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    broken: list[str] = []
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_readme_names_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in text] == []


def _shown_commands(text: str) -> list[str]:
    """Commands in code blocks and inline code, without comments; joins lines that end in a backslash."""
    code = re.findall(r"```\w*\n(.*?)```|(?<!`)`(etude [^`]+)`", text, re.DOTALL)
    lines = "\n".join(block or inline for block, inline in code).replace("\\\n", " ").splitlines()
    commands = (line.strip().removeprefix("$ ").partition(" #")[0] for line in lines)
    return [command for command in commands if command.startswith("etude ")]


def _unknown_options(found: Any, command: str) -> list[str]:
    """Options in a command line that its command, below `found`, does not have."""
    words = command.partition(" -- ")[0].split()[1:]
    while words and hasattr(found, "get_command") and found.get_command(None, words[0]) is not None:
        found = found.get_command(None, words.pop(0))
    if words and hasattr(found, "default_command"):
        found = found.get_command(None, found.default_command)
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    named = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return sorted(named - known - {"--help"})


def test_shown_commands_have_their_options() -> None:
    commands = [(page.name, command) for page in PAGES for command in _shown_commands(page.read_text())]
    assert len(commands) > 100
    root = typer.main.get_command(app)
    wrong = [
        (page, command, found) for page, command in commands if (found := _unknown_options(root, command))
    ]
    assert wrong == []


def test_docs_and_sources_use_plain_words() -> None:
    folders = ("src", "examples", "tests/fakes")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = [
        f"{file.name}: {match.group()}"
        for file in (*PAGES, *sources)
        for match in PRIVATE_WORDS.finditer(file.read_text())
    ]
    assert found == []
