"""The Python of the pages runs as it stands, or says that it is a fragment and what it needs."""

from __future__ import annotations

import ast
import asyncio
import builtins
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.sandbox.local.backend import LocalBackend
from etude.tokens import Tokenizer

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("agent", "tools", "grammars", "code-index", "trajectories", "recording", "environment-server")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FRAGMENT = re.compile(r"^# Fragment: needs (.+)\.$", re.MULTILINE)
RIPGREP = shutil.which("rg", path=f"{Path(sys.executable).parent}") or shutil.which("rg")
SLOW = ("default_embedder",)


def blocks(slow: bool) -> Iterator[Any]:
    for page in PAGES:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            line = text[: found.start()].count("\n") + 1
            if any(word in found[1] for word in SLOW) == slow:
                yield pytest.param(found[1], id=f"{page}:{line}")


def free_names(tree: ast.Module) -> set[str]:
    """Names that a block uses and nowhere makes; scopes count as one."""
    made = set(dir(builtins)) | {"__name__"}
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            made |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
    return used - made


def run(code: str, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a whole block in a directory of its own; of a fragment its imports alone."""
    tree = ast.parse(code)
    fragment = FRAGMENT.search(code)
    if fragment is None:
        assert not free_names(tree)
    else:
        missing = free_names(tree)
        assert missing <= set(re.findall(r"`([\w-]+)`", fragment[1])), missing
        tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    monkeypatch.chdir(where)
    exec(compile(tree, "block", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("code", list(blocks(slow=False)))
def test_a_block_of_the_pages_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if 'open_backend("local")' in code and (problems := LocalBackend().doctor()):
        pytest.skip(f"no namespaces here: {problems[0]}")
    if "agent.index.grep" in code and RIPGREP is None:
        pytest.skip("needs ripgrep")
    if "agent.mcp" in code:
        pytest.importorskip("mcp", reason="needs the package mcp")
    run(code, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("code", list(blocks(slow=True)))
def test_a_block_that_loads_a_model_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(code, tmp_path, monkeypatch)


def test_a_block_that_lacks_an_import_is_found() -> None:
    assert free_names(ast.parse("import a.b as c\ndef f(x):\n    return [y for y in c(x, Registry)]")) == {
        "Registry"
    }
    assert not FRAGMENT.search("x = 1  # a fragment")


def block_of(page: str, word: str) -> str:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return next(found[1] for found in BLOCK.finditer(text) if word in found[1])


def test_the_clients_of_the_environment_servers_page_play() -> None:
    pytest.importorskip("fastapi", reason="needs etude[serve]")
    from etude.agent import AgentSession, core_registry
    from etude.agent.endpoint_messages import byte_tokenizer
    from etude.records import Status, TrajectoryId
    from etude.tokens import Renderer
    from etude.tokens.grammar import XmlGrammar
    from tests.environment.playing import FINISH, MEND
    from tests.environment.server.serving import TOKEN, new_host, served
    from tests.fakes.scripted import ScriptedSampler, play

    names: dict[str, Any] = {}
    exec(block_of("environment-server", "async def play"), names)
    grammar = XmlGrammar(core_registry().schemas)
    tokenizer: Tokenizer = byte_tokenizer(grammar.control_tokens())
    renderer = Renderer(tokenizer, grammar)

    async def scenario() -> tuple[Any, str, AgentSession]:
        session = AgentSession("test_tally fails", renderer, TrajectoryId("r", "tally", 0, 0, 0))
        sampler = ScriptedSampler(play([renderer.message([MEND, FINISH])]))
        async with served(new_host()) as url:
            outcome = await names["play"](url, TOKEN, "tally", session, sampler)
            return outcome, await names["by_hand"](url, TOKEN), session

    outcome, output, session = asyncio.run(scenario())
    assert session.status is Status.DONE
    assert outcome.verdict.passed and outcome.reward.total > 0
    assert output == "1\tx = 1"
