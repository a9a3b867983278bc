import asyncio

from etude.agent import ToolLimits, full_registry
from etude.agent.index.templates import TemplateIndexes
from etude.environment.sessions import EnvironmentSession
from etude.environment.verdicts import Grader, SessionServices
from etude.records import Task, ToolCall
from etude_quickstart.memory_backend import MemoryBackend
from tests.fakes.indexes import until_built

TASK = Task("t", "find it", {"lib/tally.py": "def tally(xs):\n    return sum(xs)\n"})


def test_a_session_searches_the_index_of_its_template_and_sees_its_own_edits(tmp_path):
    async def run():
        backend = MemoryBackend()
        indexes = TemplateIndexes(tmp_path, None)
        services = SessionServices(backend, Grader(backend), full_registry(), ToolLimits(), indexes=indexes)
        session = EnvironmentSession.begin(services, TASK)
        template = session.origin.template
        assert template is not None
        await until_built(indexes, template)
        find = ToolCall("grep", {"pattern": "def"})
        write = ToolCall("write_file", {"path": "lib/more.py", "text": "def more():\n    pass\n"})
        ask = ToolCall("semantic_search", {"query": "more"})
        outputs = []
        for turn in ([find], [write], [find, ask]):
            results = await session.run_calls(turn, {}, lambda *_: None, lambda *_: None)
            outputs.append([result.output for result in results])
        await session.close()
        await indexes.close()
        return outputs

    first, _, (second, meaning) = asyncio.run(run())
    assert first == ["lib/tally.py:1: def tally(xs):"]
    assert second == "lib/more.py:1: def more():\nlib/tally.py:1: def tally(xs):"
    assert "lib/more.py" in meaning
