import pytest

from etude.agent.tools import Registry, core_registry, full_registry, registry_named, restricted
from etude.agent.tools.grep import Grep
from etude.agent.tools.search_replace import SearchReplace
from etude.errors import ConfigError
from etude.tokens.grammar import XmlGrammar

CORE = {
    "list_dir": ("path?",),
    "grep": ("pattern", "path?"),
    "read_file": ("path", "offset?", "limit?"),
    "edit_lines": ("path", "start", "end?", "text"),
    "search_replace": ("path", "old", "new"),
    "run_tests": (),
    "run_command": ("command",),
    "finish": (),
}


def written(registry):
    return {
        schema.name: tuple(p.name + ("" if p.required else "?") for p in schema.parameters)
        for schema in registry.schemas
    }


def test_the_core_tools_are_what_small_models_were_trained_with():
    assert written(core_registry()) == CORE
    assert list(written(core_registry())) == list(CORE)
    assert core_registry().digest == core_registry().digest != full_registry().digest


def test_the_full_tools_have_all_that_the_core_tools_have():
    full = written(full_registry())
    assert all(set(parameters) - {"command"} <= set(full[name]) for name, parameters in CORE.items())
    assert {"glob", "write_file", "delete_file", "apply_patch"} <= full.keys()
    assert list(full)[-1] == "finish"
    # No name is both a tool and a parameter: the tags could not be told apart.
    XmlGrammar(full_registry().schemas)


def test_a_set_can_be_named():
    assert written(registry_named("core")) == CORE
    assert written(registry_named("full")) == written(full_registry())
    assert list(registry_named(" grep , glob,finish")) == ["grep", "glob", "finish"]
    with pytest.raises(ConfigError, match="no such tool"):
        registry_named("grep,zap")
    with pytest.raises(ConfigError, match="no such tool"):
        registry_named("")


def test_a_restricted_tool_takes_the_named_parameters_only():
    tool = restricted(Grep(), ("pattern",))
    assert [parameter.name for parameter in tool.schema.parameters] == ["pattern"]
    assert tool.schema.description == Grep.schema.description and tool.repeatable
    with pytest.raises(ConfigError, match="no such parameter"):
        restricted(Grep(), ("pattern", "zap"))
    with pytest.raises(ConfigError, match="needs pattern"):
        restricted(Grep(), ("path",))


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools have the same name"):
        Registry([SearchReplace(), SearchReplace(strict=True)])
