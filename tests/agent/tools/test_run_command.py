import asyncio

import pytest
from tool_scenes import in_local, in_memory

from etude.agent import ToolLimits
from etude.agent.tools.output_files import OUTPUTS
from etude.agent.tools.run_command import RunCommand
from etude.agent.tools.terminal import Terminal
from etude.records import ToolErrorClass


class Watcher:
    """`CodeSearch` that counts what it is told."""

    def __init__(self):
        self.times = 0

    def changed_somewhere(self):
        self.times += 1


def test_a_command_shows_its_output_and_exit_code():
    async def scenario(call, context):
        shown = [(await call(command=line)).output for line in ("true", "echo a; echo b >&2; exit 3")]
        left = await call(command="cd /tmp; X=1")
        return [*shown, left.output, (await call(command="echo $X; pwd")).output]

    assert in_local([RunCommand()], scenario) == ["ok", "a\nb\nexit 3", "ok", "\n/workspace"]


def test_long_output_is_in_a_file_that_the_agent_can_search():
    async def scenario(call, context):
        result = await call(command="seq 1 5000")
        return result.output, (await call(command=f"wc -l {OUTPUTS}/1.txt; cat .etude/.gitignore")).output

    shown, lines = in_local([RunCommand()], scenario, limits=ToolLimits(output_characters=100))
    assert shown.startswith("1\n2\n") and shown.endswith("5000") and f"all in {OUTPUTS}/1.txt" in shown
    assert lines.startswith("4999 ") and lines.endswith("*")


def test_after_a_timeout_what_was_printed_is_shown_and_all_is_killed():
    async def scenario(call, context):
        late = await call(command="echo begun && echo >told; sleep 3217 & sleep 3217")
        told = "told" in [entry.path for entry in await context.sandbox.files.list()]
        # The pattern does not match the shell that runs it, nor what that shell forks.
        gone = await context.sandbox.commands.run("while pgrep -f '[s]leep 3217'; do sleep 0.05; done", 60)
        return late, told, gone

    late, told, gone = in_local([RunCommand()], scenario, limits=ToolLimits(command_timeout_s=0.5))
    assert late.output == "begun\n" * told + "error: command timed out"
    assert late.error == ToolErrorClass.TIMEOUT
    assert not gone.timed_out


def test_the_index_is_told_that_anything_may_have_changed():
    watcher = Watcher()

    async def scenario(call, context):
        await call(command="true")
        await call(command=" ")

    in_local([RunCommand()], scenario, search=watcher)
    assert watcher.times == 1


@pytest.mark.slow
def test_output_of_any_length_is_bounded():
    async def scenario(call, context):
        return await call(command="yes | head -c 300M")

    result = in_local([RunCommand()], scenario, limits=ToolLimits(command_timeout_s=120))
    assert "... cut" in result.output and len(result.output) < 4200 and result.error is None


def terminal(scenario):
    return in_local([Terminal()], scenario)


async def look_until(call, text, shown=""):
    """What looks at command 1 have shown once `text` is in it."""
    async with asyncio.timeout(60):
        while text not in shown:
            await asyncio.sleep(0.01)
            shown += (await call(id="1")).output
    return shown


def test_background_commands_are_polled_and_killed():
    async def scenario(call, context):
        started = await call(command="echo one; read x; echo got $x; sleep 3219", background="true")
        first = await call(id="1")
        again = await call(id="1")
        fed = await call(id="1", stdin="hello")
        await look_until(call, "got hello\ncommand 1 runs", fed.output)
        killed = await call(id="1", kill="true")
        after = await call(id="1")
        return [r.output for r in (started, again, fed, killed, after)], first, context.state.commands

    (started, again, fed, killed, after), first, commands = terminal(scenario)
    assert started == "started command 1"
    assert first.output in ("one\ncommand 1 runs", "command 1 runs") and first.facts["running"] is True
    assert again.endswith("command 1 runs") and fed.endswith("command 1 runs")
    assert killed == after == "command 1 has ended: exit -9"
    assert commands["1"].exit_code == -9


def test_a_poll_may_wait_for_the_end():
    async def scenario(call, context):
        await call(command="sleep 0.3; echo done; exit 4", background="true")
        result = await call(id="1", wait_s="60")
        return result, (await call(id="1", wait_s="60")).output, (await call(id="1", stdin="x")).output

    result, again, late = terminal(scenario)
    assert result.output == "done\ncommand 1 has ended: exit 4" and result.facts["exit_code"] == 4
    assert again == "command 1 has ended: exit 4" and late == "error: command 1 has ended"


def test_characters_cut_by_a_poll_come_whole_with_the_next():
    async def scenario(call, context):
        await call(command="printf 'a\\303'; read x; printf '\\251b\\n'", background="true")
        first = await look_until(call, "a\n")
        await call(id="1", stdin="")
        return first, context

    first, context = terminal(scenario)
    assert first.replace("command 1 runs", "") == "a\n"
    assert context.state.commands["1"].shown_bytes in (1, 5)


def test_two_looks_of_one_turn_show_output_once():
    from etude.agent import execute_calls
    from etude.records import ToolCall

    async def scenario(call, context):
        await call(command="echo once", background="true")
        look = ToolCall("run_command", {"id": "1", "wait_s": "60"})
        return [result.output for result in await execute_calls([look, look], context)]

    first, second = terminal(scenario)
    assert first == "once\ncommand 1 has ended: exit 0" and "once" not in second


def test_background_commands_are_bounded_and_ended_ones_make_room():
    async def scenario(call, context):
        for _ in range(16):
            await call(command="sleep 3220", background="true")
        refused = await call(command="true", background="true")
        await call(id="3", kill="true")
        return refused, await call(command="true", background="true")

    refused, started = terminal(scenario)
    assert refused.output == "error: 16 commands run already: kill one"
    assert started.output == "started command 17"


def test_commands_that_a_restored_sandbox_lost_are_said_to_be_gone():
    async def scenario(call, context):
        await call(command="echo x", background="true")
        context.state.commands["1"].pid = 999_999
        return await call(id="1")

    result = terminal(scenario)
    assert "command 1 is gone" in result.output and result.error == ToolErrorClass.UNEXPECTED_ENVIRONMENT


def test_the_agent_chooses_how_long_a_command_may_take():
    async def scenario(call, context):
        return [await call(command="sleep 3218", timeout_s=t) for t in ("1", "0", "-3", "9999", "x")]

    late, *wrong = terminal(scenario)
    assert late.error == ToolErrorClass.TIMEOUT
    assert [result.output for result in wrong] == [
        "error: timeout_s must be up to 600",
        "error: timeout_s must be up to 600",
        "error: timeout_s must be up to 600",
        "error: timeout_s is not a number",
    ]


def test_forms_that_do_not_fit_are_refused_in_few_words():
    async def scenario(call, context):
        return {
            message: (await call(**arguments)).output
            for message, arguments in {
                "command is empty": {"command": "  "},
                "no command was started": {"id": "1"},
                "command does not go with id": {"id": "1", "command": "ls"},
                "kill needs id": {"kill": "true"},
                "stdin needs id": {"stdin": "", "command": "ls"},
                "kill goes with id alone": {"id": "1", "kill": "yes", "stdin": "x"},
                "timeout_s does not go with background": {
                    "command": "ls",
                    "background": "true",
                    "timeout_s": "3",
                },
                "background must be true or false": {"command": "ls", "background": "maybe"},
                "unknown parameter shell": {"command": "ls", "shell": "zsh"},
            }.items()
        }

    for message, output in terminal(scenario).items():
        assert output == f"error: {message}"


@pytest.mark.parametrize("arguments", [{"command": "ls", "id": " "}, {"id": "1", "stdin": ""}])
def test_whatever_runs_something_is_asked_about(arguments):
    async def approve(call):
        return "not this one"

    async def scenario(call, context):
        return await call(**arguments)

    asked = in_memory([Terminal()], scenario, approve=approve)
    assert (asked.output, asked.error) == ("error: not this one", ToolErrorClass.USER_ABORTED)


def test_the_agents_own_harm_to_the_outputs_is_an_outcome():
    async def scenario(call, context):
        await call(command="mkdir -p .etude && ln -s /etc .etude/outputs")
        refused = await call(command="true", background="true")
        shown = await call(command="seq 1 3000")
        return refused, shown

    refused, shown = terminal(scenario)
    assert refused.error is not None and refused.output.startswith("error: ")
    assert "not kept" in shown.output


def test_a_command_whose_output_the_agent_removed_still_tells_its_end():
    async def scenario(call, context):
        await call(command="echo long output; read x; echo more", background="true")
        await call(id="1")
        await call(command=f": > {OUTPUTS}/command-1.txt")
        await call(id="1", stdin="go")
        emptied = await call(id="1", wait_s="60")
        await call(command="rm -r .etude")
        return emptied.output, await call(id="1")

    emptied, removed = terminal(scenario)
    assert emptied.endswith("command 1 has ended: exit 0")
    assert "no such file" in removed.output and removed.output.endswith("command 1 has ended: exit 0")
    assert removed.error is None
