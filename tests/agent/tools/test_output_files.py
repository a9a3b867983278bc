import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent import ToolContext, ToolLimits
from etude.agent.tools.output_files import OUTPUTS, bounded, head_and_tail, readable
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend


@pytest.mark.parametrize(
    ("printed", "read"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07shell", "shell"),
        ("\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b(Bascii\x1b=", "ascii"),
        ("\x1bPdevice string\x1b\\after", "after"),
        (" 10%\r 50%\r100%\ndone\n", "100%\ndone\n"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("last\r", "last"),
        ("o\x08oo\x08o", "oo"),
        ("ring\x07", "ring"),
        ("nul\x00 \x9b", "nul\ufffd \ufffd"),
        ("bytes \udcff", "bytes \ufffd"),
        ("cut \x1b[12", "cut "),
        ("\x1b]no end\nnext", "\nnext"),
    ],
)
def test_what_a_terminal_would_show_is_shown(printed, read):
    assert readable(printed) == read


@given(st.text(alphabet=st.characters() | st.sampled_from("\x1b[]\r\n\b\x07;m0\udcff"), max_size=60))
def test_readable_text_holds_nothing_unreadable(text):
    shown = readable(text)
    assert readable(shown) == shown
    assert not set(shown) & {chr(n) for n in range(32) if chr(n) not in "\t\n"}
    shown.encode()


@pytest.mark.parametrize("trap", ["\x1b[0;", "\x1b]x", "\x1b[" + "0" * 50, "a\x08", "x\r", "\x1b"])
def test_reading_takes_linear_time(trap):
    def seconds(count):
        text = trap * count
        start_s = time.process_time()
        readable(text)
        return time.process_time() - start_s

    short = min(seconds(20_000) for _ in range(3))
    assert min(seconds(160_000) for _ in range(3)) < 30 * short + 0.05


def test_head_and_tail_keep_both_ends():
    assert head_and_tail("abcdef", 4) == "ab\n... 2 characters ...\nef"
    assert head_and_tail("abcd", 4) == "abcd"
    assert head_and_tail("abcdef", 4, ", all in x") == "ab\n... 2 characters, all in x ...\nef"


def scene(scenario, files=None):
    async def run():
        sandbox = await MemoryBackend().create(Template(files or {}))
        context = ToolContext(sandbox, {}, limits=ToolLimits(output_characters=10))
        return await scenario(context), sandbox.workspace.contents

    return asyncio.run(run())


def test_long_output_is_kept_whole():
    async def scenario(context):
        return [await bounded(text, context) for text in ("short", "a" * 20, "é" * 20)]

    (short, first, second), files = scene(scenario)
    assert short == "short"
    assert first == f"aaaaa\n... 10 characters, all in {OUTPUTS}/1.txt ...\naaaaa"
    assert files[f"{OUTPUTS}/1.txt"] == b"a" * 20
    assert "2.txt" in second and files[f"{OUTPUTS}/2.txt"].decode() == "é" * 20
    assert files[".etude/.gitignore"] == b"*\n"


def test_output_that_cannot_be_kept_is_shown_all_the_same():
    shown, files = scene(lambda context: bounded("a" * 20, context), {OUTPUTS: "a file of the agent's"})
    assert shown.startswith("aaaaa\n... 10 characters, not kept: ") and len(files) <= 2
