import asyncio
import json
import shlex
import sys

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

import mcp_types as types
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client
from mcp.server import Server
from mcp.shared.exceptions import MCPError

from etude.agent import ToolContext, execute_calls
from etude.agent.mcp import client as mcp_client
from etude.agent.mcp.client import SessionServers, describe_servers
from etude.agent.mcp.server import mcp_server
from etude.agent.tools import Registry
from etude.agent.tools.mcp_schemas import own_name, parameters_of, text_of
from etude.agent.tools.mcp_tool import served_tools
from etude.agent.tools.registries import agent_registry, full_registry
from etude.agent.tools.state import ToolState
from etude.config import AgentConfig, McpConfig, parse_config
from etude.errors import ConfigError, InfrastructureError, SandboxError
from etude.records import ToolCall, ToolErrorClass
from etude.sandbox.template import Template
from etude.tokens.grammar import HermesGrammar, XmlGrammar, read_value
from etude_quickstart.memory_backend import MemoryBackend

FILES = {"lib/tally.py": "def tally():\n    return 1\n"}

CHILD = """
import asyncio
from etude.agent import ToolContext
from etude.agent.mcp.server import serve_stdio
from etude.agent.tools.mcp_schemas import own_name, parameters_of, text_of
from etude.agent.tools.mcp_tool import served_tools
from etude.agent.tools.registries import agent_registry, full_registry
from etude_quickstart.memory_backend import MemoryBackend
from etude.sandbox.template import Template

async def main():
    sandbox = await MemoryBackend().create(Template({"a.py": "one\\n"}))
    await serve_stdio(ToolContext(sandbox, full_registry()))

asyncio.run(main())
"""


def serve(scenario, mode="auto", tools=None):
    """Runs a scenario with the package's own client on our tools."""

    async def run():
        sandbox = await MemoryBackend().create(Template(FILES))
        context = ToolContext(sandbox, tools or full_registry())
        async with Client(mcp_server(context), mode=mode) as client:
            return await scenario(client, context)

    return asyncio.run(run())


def text(result):
    return "\n".join(block.text for block in result.content)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_our_tools_are_listed_and_called(mode):
    async def scenario(client, context):
        listed = (await client.list_tools()).tools
        read = await client.call_tool("read_file", {"path": "lib/tally.py", "offset": 2, "limit": 1})
        edit = await client.call_tool("search_replace", {"path": "lib/tally.py", "old": "1", "new": "2"})
        after = await client.call_tool("grep", {"pattern": "return", "path": None})
        return listed, [text(result) for result in (read, edit, after)], edit.is_error

    listed, outputs, is_error = serve(scenario, mode)
    assert outputs == ["2\t    return 1", "ok", "lib/tally.py:2: return 2"] and not is_error
    names = {tool.name: tool for tool in listed}
    assert names.keys() == full_registry().keys() - {"finish"}
    assert names["read_file"].input_schema == full_registry()["read_file"].schema.json_schema()
    assert names["read_file"].annotations.read_only_hint is True
    assert names["run_command"].annotations.read_only_hint is False


def test_values_that_are_no_text_reach_a_tool():
    async def scenario(client, context):
        todos = [{"id": "a", "text": "x"}]
        await client.call_tool("todo_write", {"todos": todos})
        return text(await client.call_tool("todo_write", {"todos": [{"text": "y"}], "merge": True}))

    assert serve(scenario) == "[ ] a x\n[ ] 1 y"


def test_what_was_asked_wrongly_is_an_error_result():
    async def scenario(client, context):
        calls = [
            ("read_file", {"path": "no.py"}),
            ("read_file", {"path": "../x"}),
            ("grep", {}),
            ("grep", {"pattern": "x", "colour": "red"}),
        ]
        return [await client.call_tool(name, arguments) for name, arguments in calls]

    results = serve(scenario)
    assert all(result.is_error for result in results)
    assert [text(result) for result in results] == [
        "error: no such file or directory",
        "error: the path leaves the workspace",
        "error: missing pattern",
        "error: unknown parameter colour",
    ]


def test_unknown_tools_and_failing_infrastructure_are_protocol_errors():
    async def scenario(client, context):
        with pytest.raises(MCPError, match="unknown tool zap"):
            await client.call_tool("zap", {})
        with pytest.raises(MCPError, match="unknown tool finish"):
            await client.call_tool("finish", {})

        async def gone(path, limit_bytes=0):
            raise SandboxError("the host died")

        context.sandbox.files.read = gone
        with pytest.raises(MCPError, match="infrastructure failed"):
            await client.call_tool("read_file", {"path": "a"})

    serve(scenario)


def test_calls_that_conflict_keep_their_order_and_others_do_not_wait():
    async def scenario(client, context):
        order = []
        files = context.sandbox.files
        write, read = files.write, files.read
        begun, gate = asyncio.Event(), asyncio.Event()

        async def slow_write(path, data):
            begun.set()
            await gate.wait()
            order.append(path)
            await write(path, data)

        async def seen(path, limit_bytes=1 << 20):
            order.append(f"read {path}")
            return await read(path, limit_bytes)

        files.write, files.read = slow_write, seen
        writing = asyncio.create_task(client.call_tool("write_file", {"path": "a", "text": "x\n"}))
        await begun.wait()
        waiting = asyncio.create_task(client.call_tool("read_file", {"path": "a"}))
        await client.call_tool("read_file", {"path": "lib/tally.py"})
        assert "read lib/tally.py" in order and not waiting.done()
        gate.set()
        return text(await waiting), (await writing).is_error, order

    shown, is_error, order = serve(scenario)
    assert shown == "1\tx" and not is_error and order.index("a") < len(order) - 1


@pytest.mark.slow
def test_our_tools_are_served_over_standard_input_and_output(tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(CHILD)

    async def run():
        env = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
        command = shlex.join([sys.executable, str(script)])
        described = await describe_servers({"far": McpConfig(command=command, where="host", env=env)})
        registry, servers = Registry(served_tools(described)), SessionServers(described)
        context = ToolContext(await MemoryBackend().create(Template()), registry, servers=servers)
        try:
            return registry, await execute_calls(
                [
                    ToolCall("far_read_file", {"path": "a.py", "limit": "1"}),
                    ToolCall("far_read_file", {"path": "a.py", "limit": "many"}),
                    ToolCall("far_read_file", {"path": "b.py"}),
                ],
                context,
            )
        finally:
            await servers.close()

    registry, (read, wrong, missing) = asyncio.run(run())
    assert "far_run_command" in registry and "far_finish" not in registry
    assert read.output == "1\tone" and read.error is None
    assert wrong.error == ToolErrorClass.INVALID_ARGUMENTS and "not an integer" in wrong.output
    assert missing.error == ToolErrorClass.UNEXPECTED_ENVIRONMENT
    # Both grammars can offer what was found.
    XmlGrammar(registry.schemas)
    HermesGrammar(registry.schemas)


SCHEMA = {
    "type": "object",
    "properties": {
        "maxCount": {"type": ["integer", "null"], "description": "how\n many"},
        "labels": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "state": {"type": "string", "enum": ["open", "closed"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "filter": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
    "required": ["state"],
}


def foreign(call_tool, tools=None):
    async def list_tools(request, params):
        listed = tools or [types.Tool(name="list-Issues", description="All\n issues", input_schema=SCHEMA)]
        return types.ListToolsResult(tools=listed)

    return Server("foreign", on_list_tools=list_tools, on_call_tool=call_tool)


def use(server, *calls, call_s=60.0, **settings):
    """The tools of a server in this process, named `p`, and the results of calls."""

    async def run():
        known = await describe_servers({"p": McpConfig(command="stub", where="host", **settings)})
        registry = agent_registry(AgentConfig(tools="finish", mcp=known))
        servers = SessionServers(known, call_s=call_s)
        context = ToolContext(
            await MemoryBackend().create(Template()), registry, state=ToolState(), servers=servers
        )
        try:
            results = await execute_calls([ToolCall(*call) for call in calls], context)
            return [tool for name, tool in registry.items() if name != "finish"], results
        finally:
            await servers.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mcp_client, "_transport", lambda name, config, sandbox: server)
        return asyncio.run(run())


def test_tools_of_other_servers_get_their_own_names_and_types():
    seen = []

    async def call_tool(request, params):
        seen.append((params.name, params.arguments))
        return types.CallToolResult(
            content=[types.TextContent(text="two"), types.ImageContent(data="eA==", mime_type="image/png")]
        )

    arguments = {
        "max_count": "3",
        "labels": '["a"]',
        "state": "open",
        "either": "7",
        "filter": '{"a": 1.5}',
    }
    tools, (result, wrong) = use(
        foreign(call_tool), ("p_list_issues", arguments), ("p_list_issues", {"state": "ajar"})
    )
    assert tools[0].schema.description == "All issues"
    assert [(p.name, p.kind, p.required) for p in tools[0].schema.parameters] == [
        ("max_count", "integer", False),
        ("labels", "array", False),
        ("state", "string", True),
        ("either", "string", False),
        ("filter", "object", False),
    ]
    expected = {"maxCount": 3, "labels": ["a"], "state": "open", "either": "7", "filter": {"a": 1.5}}
    assert seen == [("list-Issues", expected)]
    assert result.output == "two\n[image]" and result.facts == {"kind": "mcp"}
    assert wrong.error == ToolErrorClass.INVALID_ARGUMENTS


def test_errors_of_other_servers_are_sorted_by_whose_they_are():
    async def call_tool(request, params):
        match params.arguments["state"]:
            case "open":
                return types.CallToolResult(content=[types.TextContent(text="no right")], is_error=True)
            case "closed":
                raise MCPError(types.INVALID_PARAMS, "no such state")

    _, (refused, invalid) = use(
        foreign(call_tool), ("p_list_issues", {"state": "open"}), ("p_list_issues", {"state": "closed"})
    )
    assert (refused.output, refused.error) == ("error: no right", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
    assert (invalid.output, invalid.error) == ("error: no such state", ToolErrorClass.INVALID_ARGUMENTS)


def test_a_server_that_fails_or_hangs_is_never_an_answer():
    async def broken(request, params):
        raise RuntimeError("bug")

    async def hanging(request, params):
        await asyncio.sleep(30)

    with pytest.raises(InfrastructureError, match="MCP server failed"):
        use(foreign(broken), ("p_list_issues", {"state": "open"}))
    with pytest.raises(InfrastructureError, match=r"within 0.2 s"):
        use(foreign(hanging), ("p_list_issues", {"state": "open"}), call_s=0.2)


@pytest.mark.parametrize("command", ["/no/such/program", "no-such-program --stdio"])
def test_a_server_whose_program_is_missing_is_the_users_mistake(command):
    with pytest.raises(ConfigError, match=r"agent\.mcp\.bad\.command: there is no such program here"):
        asyncio.run(describe_servers({"bad": McpConfig(command=command, where="host")}))


def test_a_server_that_does_not_start_is_named():
    with pytest.raises(InfrastructureError, match=r"agent\.mcp\.bad: the MCP server did not start"):
        asyncio.run(describe_servers({"bad": McpConfig(command="/bin/false", where="host")}))


def test_a_server_that_does_not_start_says_why(capfd):
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit('no token for the issues')"])
    with pytest.raises(InfrastructureError, match="its error output: no token for the issues"):
        asyncio.run(describe_servers({"bad": McpConfig(command=command, where="host")}))
    assert "no token" not in capfd.readouterr().err


def test_servers_are_trusted_only_where_told():
    hints = types.ToolAnnotations(read_only_hint=True)
    tool = types.Tool(name="look", input_schema={"type": "object"}, annotations=hints)

    async def call_tool(request, params):
        return types.CallToolResult(content=[])

    for trusted in (False, True):
        (found,), (result,) = use(foreign(call_tool, [tool]), ("p_look", {}), trusted=trusted)
        assert found.repeatable is trusted and result.output == "ok"
        assert bool(found.access({}).writes) is not trusted


def test_tools_are_chosen_by_name_and_clashes_are_refused():
    async def call_tool(request, params):
        return types.CallToolResult(content=[])

    def named(*names):
        return [types.Tool(name=name, input_schema={"type": "object"}) for name in names]

    chosen, _ = use(foreign(call_tool, named("a", "b")), tools=("b",))
    assert [tool.schema.name for tool in chosen] == ["p_b"]
    with pytest.raises(ConfigError, match="no such tool"):
        use(foreign(call_tool, named("a")), tools=("z",))
    with pytest.raises(ConfigError, match="another tool"):
        use(foreign(call_tool, named("get-it", "getIt")))
    with pytest.raises(ConfigError, match="lower_snake_case"):
        parse_config({"agent": {"mcp": {"A-b": {"command": "x"}}}})
    with pytest.raises(ConfigError, match="either command or url"):
        parse_config({"agent": {"mcp": {"a": {}}}})


def test_names_become_identifiers():
    names = {"listIssues": "list_issues", "a.b/c": "a_b_c", "2fast": "x_2fast", "HTTP": "http"}
    assert {name: own_name(name) for name in names} == names
    with pytest.raises(ConfigError, match="neither letters"):
        own_name("--")
    with pytest.raises(ConfigError, match="two parameters"):
        parameters_of({"properties": {"aB": {}, "a_b": {}}})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)
KEYS = st.sampled_from(["type", "enum", "anyOf", "properties", "required", "items", "description"])
KINDS = st.sampled_from(["string", "integer", "array", "object", "boolean", "number", "null"])


@given(
    st.dictionaries(
        st.sampled_from(["a", "b1"]), st.dictionaries(KEYS, json_values | KINDS, max_size=4), max_size=2
    )
)
def test_any_schema_becomes_parameters(properties):
    parameters = parameters_of({"properties": properties, "required": ["a"]})
    assert parameters.keys() == properties.keys()
    for parameter in parameters.values():
        json.dumps(parameter.json_schema())


@given(st.integers(-(10**9), 10**9) | st.booleans() | st.lists(st.text(max_size=5), max_size=3))
def test_values_come_back_from_their_text(value):
    kind = {int: "integer", bool: "boolean", list: "array"}[type(value)]
    (parameter,) = parameters_of({"properties": {"x": {"type": kind}}}).values()
    assert read_value(parameter, text_of(value)) == value
