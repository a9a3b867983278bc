"""The sets of tools that an agent is offered, by name.

A model is trained with one set, whose names and parameters are part of its tokens: a set, once used, never
changes. `core` is the set of small models trained from scratch; `full` has every tool with all its
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from etude.agent.tools.apply_patch import ApplyPatch
from etude.agent.tools.ask_user import AskUser
from etude.agent.tools.delete_file import DeleteFile
from etude.agent.tools.edit_lines import EditLines
from etude.agent.tools.finish import Finish
from etude.agent.tools.glob import Glob
from etude.agent.tools.grep import Grep
from etude.agent.tools.interface import Tool
from etude.agent.tools.list_dir import ListDir
from etude.agent.tools.mcp_tool import served_tools
from etude.agent.tools.read_file import ReadFile
from etude.agent.tools.read_lints import ReadLints
from etude.agent.tools.registry import Registry, restricted
from etude.agent.tools.run_command import RunCommand
from etude.agent.tools.run_tests import RunChosenTests, RunTests
from etude.agent.tools.search_replace import SearchReplace
from etude.agent.tools.semantic_search import SemanticSearch
from etude.agent.tools.terminal import Terminal
from etude.agent.tools.todo_write import TodoWrite
from etude.agent.tools.write_file import WriteFile
from etude.config import SEARCHING, AgentConfig, McpConfig
from etude.errors import ConfigError
from etude.tokens.grammar import ToolSchema

_FULL: tuple[Callable[[], Tool], ...] = (
    *(ListDir, Glob, Grep, ReadFile, EditLines, SearchReplace, WriteFile, DeleteFile, ApplyPatch),
    *(RunChosenTests, Terminal, ReadLints, TodoWrite, SemanticSearch, AskUser, Finish),
)
_SEARCH = SemanticSearch.schema.name


def core_registry() -> Registry:
    """The eight tools of small models, in the order in which a tokenizer gets their tags."""
    replace = restricted(SearchReplace(strict=True, hints=False), ("path", "old", "new"))
    reading = (restricted(ListDir(), ("path",)), restricted(Grep(), ("pattern", "path")), ReadFile())
    return Registry([*reading, EditLines(), replace, RunTests(), RunCommand(), Finish()])


def full_registry() -> Registry:
    """Every tool with all its parameters."""
    return Registry(make() for make in _FULL)


def registry_named(name: str) -> Registry:
    """`core`, `full`, or the tools of a list such as `read_file,grep,finish`, with all their parameters.

    Raises ConfigError for an unknown name.
    """
    if name == "core":
        return core_registry()
    if name == "full":
        return full_registry()
    known = {tool.schema.name: tool for tool in full_registry().values()}
    names = [part.strip() for part in name.split(",")]
    for unknown in (part for part in names if part not in known):
        raise ConfigError(
            "no such tool", field="tools", received=unknown, fix=f"core, full, or some of {', '.join(known)}"
        )
    return Registry(known[part] for part in names)


def agent_registry(agent: AgentConfig, auto_tools: str = "full") -> Registry:
    """The tools that the section `agent` gives a model: a set, `semantic_search` if there is an index for it,
    and the tools of MCP servers. `auto_tools`: the set that `auto` means.

    Raises ConfigError for a tool that is unknown or cannot work, and for names that clash.
    """
    named = auto_tools if agent.tools == "auto" else agent.tools
    tools = dict(registry_named(named))
    is_searched = agent.index in SEARCHING
    if named in ("core", "full"):
        if not is_searched:
            tools.pop(_SEARCH, None)
        elif _SEARCH not in tools:
            tools[_SEARCH] = SemanticSearch()
    elif _SEARCH in tools and not is_searched:
        raise ConfigError(
            f"{_SEARCH} needs an index",
            field="agent.tools",
            received=named,
            fix='set agent.index = "meaning", or "words"',
        )
    offered = [*tools.values(), *served_tools(agent.mcp)]
    names = [tool.schema.name for tool in offered]
    parameters = {parameter.name for tool in offered for parameter in tool.schema.parameters}
    for name in names:  # which a grammar must be able to tell apart
        if names.count(name) > 1 or name in parameters:
            raise ConfigError(
                "is also the name of a parameter or another tool",
                field="agent.mcp",
                received=name,
                fix="give the server another name, or leave the tool out",
            )
    return Registry(offered)


def registry_of(schemas: Sequence[ToolSchema], servers: Mapping[str, McpConfig] | None = None) -> Registry:
    """The tools with these schemas, including tools of MCP servers. Raises ConfigError for a schema that no
    tool has."""
    offered = [*full_registry().values(), *core_registry().values(), *served_tools(servers or {})]
    known = {repr(tool.schema): tool for tool in offered}
    for schema in schemas:
        if repr(schema) not in known:
            raise ConfigError("no tool has this schema", field="tools", received=schema.name)
    return Registry(known[repr(schema)] for schema in schemas)
