"""All modules in `src` are used: by a command, by a program that a run starts, or as documented API."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PROGRAMS = (
    "etude.sandbox.inside",  # the program inside every sandbox
    "etude.environment.probe_inside",  # what `etude env tells` runs in one
    "etude.environment.making.suite_inside",  # runs a project's tests in a sandbox
    "etude.inference.vllm.worker",  # what vLLM's interpreter runs
)
"""Modules started by path in another interpreter, with all their submodules."""
PUBLIC = {
    "etude.inference.server.client": "serving.md",
}
"""Public API for users' programs -> the page of the docs that shows it."""
STAND_INS = re.compile(r"(^|\.)(fakes?|simulations?|simulated|faulty)(_\w+)?(\.|$)")
NO_STAND_INS = (
    "etude.agent.simulated_user",  # answers the agent's questions in rollouts
)


def _modules() -> set[str]:
    found = (path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src").rglob("*.py"))
    return {".".join(path.parts).removesuffix(".__init__") for path in found}


def _below(name: str, roots: Iterable[str]) -> bool:
    return any(name == root or name.startswith((f"{root}.", f"{root}_")) for root in roots)


def _reached(starts: Iterable[str]) -> set[str]:
    """All modules that these import directly or indirectly, anywhere in them, and their parent packages."""
    graph = grimp.build_graph("etude", cache_dir=None)
    todo, reached = list(starts), set[str]()
    while todo:
        name = todo.pop()
        if name and name not in reached:
            reached.add(name)
            todo.append(name.rpartition(".")[0])
            todo += graph.find_modules_directly_imported_by(name) if name in graph.modules else ()
    return reached


def test_every_module_is_reached() -> None:
    modules = _modules()
    names = re.findall(r'"(\w+):\w+"', (ROOT / "src/etude/cli/app.py").read_text(encoding="utf-8"))
    commands = {f"etude.cli.{name}" for name in names}
    assert len(commands) >= 20
    programs = {name for name in modules if _below(name, PROGRAMS)}
    by_programs = _reached(commands | programs)
    assert sorted(modules - by_programs - _reached(PUBLIC)) == []
    assert sorted(PUBLIC.keys() & by_programs) == [], (
        "a program reaches these: they need no place in the list above"
    )


def test_pages_show_the_public_modules() -> None:
    pages = {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in PUBLIC.values()}
    assert [name for name, page in PUBLIC.items() if name not in pages[page]] == []


def test_fakes_and_simulations_live_outside_src() -> None:
    found = [name for name in _modules() if STAND_INS.search(name) and not _below(name, NO_STAND_INS)]
    assert found == []
