"""The Dockerfile parser: lines, forms, and what it refuses."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.dockerfile import BUILDING, IGNORED, Instruction, parse_dockerfile


def instructions(body: str) -> list[Instruction]:
    return list(parse_dockerfile(f"FROM base\n{body}").stages[0].instructions)


def test_lines_are_joined_and_numbered() -> None:
    text = "\ufeff# a comment\nFROM base\r\n\nRUN a \\\n  # inside\n\n  && b\nenv X=1\nRUN c\\"
    found = [(one.line, one.keyword, one.text) for one in parse_dockerfile(text).stages[0].instructions]
    assert found == [(4, "RUN", "a   && b"), (8, "ENV", "X=1"), (9, "RUN", "c")]


def test_another_escape_character() -> None:
    text = "# syntax=x/y\n# escape=`\nFROM base\nRUN dir `\n  C:\\\nRUN two"
    parsed = parse_dockerfile(text)
    assert parsed.escape == "`"
    assert [one.text for one in parsed.stages[0].instructions] == ["dir   C:\\", "two"]


def test_a_directive_after_a_comment_is_a_comment() -> None:
    assert parse_dockerfile("# hello\n# escape=`\nFROM base").escape == "\\"


def test_json_and_shell_forms() -> None:
    json_form, shell, broken = instructions('RUN ["a", "b c"]\nRUN [ -f x ] && y\nRUN ["a", 1]')
    assert json_form.words == ("a", "b c")
    assert shell.words is None
    assert broken.words is None


def test_options_come_before_the_rest() -> None:
    (one,) = instructions("COPY --from=build --chmod=755 a --b /c")
    assert one.flags == (("from", "build"), ("chmod", "755"))
    assert one.flag("from") == "build"
    assert one.text == "a --b /c"


def test_stages_have_names_and_arguments_may_come_first() -> None:
    parsed = parse_dockerfile("ARG V=1\nFROM base:$V AS Build\nRUN a\nFROM scratch\nCOPY --from=build /a /b")
    assert [(stage.base, stage.name, len(stage.instructions)) for stage in parsed.stages] == [
        ("base:$V", "build", 1),
        ("scratch", None, 1),
    ]
    assert [one.text for one in parsed.arguments] == ["V=1"]


def test_every_known_instruction_is_read() -> None:
    text = {"SHELL": '["/bin/bash", "-c"]', "ENV": "A=b", "COPY": "a b", "ADD": "a b"}
    keywords = sorted({*BUILDING, *IGNORED} - {"FROM"})
    found = instructions("\n".join(f"{keyword} {text.get(keyword, 'x')}" for keyword in keywords))
    assert [one.keyword for one in found] == keywords


REFUSED = {
    "FROM base\nRUN true\nONBUILD RUN x": ("line 3: ONBUILD", "docker backend"),
    "FROM base\nFETCH x": ("line 2: FETCH", "not supported"),
    "FROM base\n\nRUN <<EOF\nls\nEOF": ("line 3: RUN", "here-documents"),
    "FROM base\nCOPY <<-'E' /x": ("line 2: COPY", "here-documents"),
    "RUN x\nFROM base": ("line 1: RUN", "before FROM"),
    "FROM a b": ("line 1: FROM", "does not parse"),
    "FROM a AS -x": ("line 1: FROM", "name for a stage"),
    "FROM base\nRUN": ("line 2: RUN", "argument"),
    "FROM base\nRUN []": ("line 2: RUN", "no command"),
    "FROM base\nENV A='x": ("line 2: ENV", "never closed"),
    "FROM base\nENV A=${x:?y}": ("line 2: ENV", "variable"),
    "FROM base\nSHELL /bin/sh": ("line 2: SHELL", "JSON"),
    "FROM base\nRUN --mount=type=secret,id=x y": ("line 2: RUN", "cache"),
    "FROM base\nRUN --security=insecure y": ("line 2: RUN", "option"),
    "FROM base\nRUN --network=none y": ("line 2: RUN", "networks"),
    "FROM base\nCOPY --parents a b": ("line 2: COPY", "option"),
    'FROM base\nCOPY ["\\ud800", "b"]': ("line 2: COPY", "no text"),
    "FROM base\nRUN a\0b": ("line 2: RUN", "NUL"),
    "": ("Dockerfile", "no FROM"),
    "# only a comment": ("Dockerfile", "no FROM"),
    "# escape=x\nFROM base": ("line 1", "escape"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_docker_would_do_and_we_do_not_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(TemplateError) as caught:
        parse_dockerfile(text)
    for part in REFUSED[text]:
        assert part in str(caught.value)


@pytest.mark.parametrize("command", ["x=$((1<<2))", "echo 1 << 2", "cat <<< word", "[ 1 -lt 2 ]"])
def test_other_uses_of_angle_brackets_are_no_heredocs(command: str) -> None:
    assert instructions(f"RUN {command}")[0].text == command


PIECES = st.sampled_from(
    [
        *("FROM base", "RUN ", "COPY ", "ENV ", "ARG ", "ONBUILD", "AS", "x=1", "$X", "${X:-", "}", '["a"]'),
        *("\n", "\\\n", "#", " ", "\t", "\r", "\0", "é", '"', "'", "[", "]", "--from=", "--", "<<EOF"),
        *("\\", "`", "# escape=`\n"),
    ]
)


@given(st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=200))
@example("FROM base\nRUN " + "[" * 5000)
@example("FROM base\nCOPY " + '["a",' * 3000)
def test_any_text_parses_or_is_a_template_error(text: str) -> None:
    try:
        parsed = parse_dockerfile(text)
    except TemplateError as error:
        assert error.field is not None
        return
    lines = text.count("\n") + 1
    assert all(1 <= one.line <= lines for stage in parsed.stages for one in stage.instructions)


REPEATED = ["RUN x\n", "RUN a \\\n", "# c\n", "ENV A=$B", '"', "${X:-", "\\", "[", " ", "<", "9", "\n"]


@pytest.mark.parametrize("piece", [*REPEATED, "--mount=type=cache "])
def test_parsing_takes_linear_time(piece: str) -> None:
    def seconds(count: int) -> float:
        text = "FROM base\nRUN " + piece * (count // len(piece))
        times: list[float] = []
        for _ in range(3):
            start = time.process_time()
            with contextlib.suppress(TemplateError):
                parse_dockerfile(text)
            times.append(time.process_time() - start)
        return min(times)

    # Thirty times the text: 900 times the work would be quadratic.
    assert seconds(240_000) < 200 * seconds(8_000) + 0.02
