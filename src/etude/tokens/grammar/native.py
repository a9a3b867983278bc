"""Calls in the syntax of a published model family: any `CallForm`, rendered and parsed.

Strings are written raw between the strings around a value; any other value as JSON, which the tools check.
The model's own chat template announces the tools (`Renderer.describe`).

Strings of the form that are tokens are recognised only as tokens, so a value may hold their characters. The
others are recognised in characters; inside a value only the one that closes it: a value that contains it ends
there.

Reading goes from state to state:

    outside -> section -> name -> in a call -> key -> value
                  ^------- call ends --|  ^--- value ends --|

Anything else is a malformed call: it becomes a ToolCall with a short `error` for the agent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial

from etude.records import ToolCall
from etude.tokens.grammar.call_forms import CALL_FORMS, CallForm
from etude.tokens.grammar.events import ParseEvent, TextDelta
from etude.tokens.grammar.hermes import HermesGrammar, JsonCall, render_arguments, without_tags
from etude.tokens.grammar.interface import MAX_NAME_CHARACTERS, Parameter, ToolSchema, ToolTable, check_names
from etude.tokens.grammar.json_reader import printable
from etude.tokens.grammar.message_parser import CallReader, Grammar, OpenCall, ParserMode, WordSet
from etude.tokens.pieces import Piece, join_text

_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
_NULLS = ("null", "None")
"""Values that omit an optional parameter that is no string."""


class NativeGrammar(Grammar):
    """One `CallForm` for a fixed set of tools. Raises ConfigError for names that cannot be written."""

    def __init__(self, form: CallForm, tools: Sequence[ToolSchema]) -> None:
        check_names(tools, ("<", ">", '"', "\n"))
        super().__init__(form.name, tools, form.tags)
        self.form = form
        self.numbers_restart = form.numbers_restart

    def render_calls(self, calls: Sequence[ToolCall], behind_words: bool, num_before: int = 0) -> list[Piece]:
        """All calls of an answer, with the separators between them and before the first."""
        form = self.form
        opened, closed = form.section
        pieces: list[Piece] = []
        for number, call in enumerate(calls, 0 if form.numbers_restart else num_before):
            if pieces and (form.between or not form.call[0]):
                pieces += self.split(closed + form.between + opened)
            pieces += self._render_call(call, number)
        return join_text([*self.split(form.lead[behind_words] + opened), *pieces, *self.split(closed)])

    def _render_call(self, call: ToolCall, number: int) -> list[Piece]:
        form = self.form
        kinds = {name: parameter.kind for name, parameter in self._table.get(call.name, {}).items()}
        before, behind = form.id
        name = f"{before}{call.name}{behind}{number}" if behind else call.name
        pieces: list[Piece] = [*self.split(form.call[0]), name, *self.split(form.name_end)]
        if not form.key[0]:
            arguments = without_tags(render_arguments(call, self._table), form.tags)
            return [*pieces, arguments, *self.split(form.call[1])]
        for name, text in call.arguments.items():
            if form.python_words and kinds.get(name, "string") != "string":
                text = _PYTHON_WORDS.get(text, text)
            pieces += [*self.split(form.key[0]), name, *self.split(form.key[1] + form.value[0])]
            pieces += [text, *self.split(form.value[1])]
        return [*pieces, *self.split(form.call[1])]

    def _reader(self, mode: ParserMode) -> Callable[[], CallReader]:
        return partial(NativeReader, self._table, FormTags(self.form, mode))


ANNOUNCED_GRAMMARS: Mapping[str, Callable[[Sequence[ToolSchema]], Grammar]] = {
    **{form.name: partial(NativeGrammar, form) for form in CALL_FORMS},
    "hermes_told": partial(HermesGrammar, announced_by_template=True),
}
"""Grammars whose tools the model's own chat template announces, by name."""


class _Place(Enum):
    OUTSIDE = auto()
    SECTION = auto()
    """Between two calls, or between the parts of a call."""
    NAME = auto()
    KEY = auto()
    GAP = auto()
    """After a key, before the string that opens its value."""
    VALUE = auto()


class FormTags:
    """The strings of a form without the newlines around them, and where they are recognised in characters."""

    def __init__(self, form: CallForm, mode: ParserMode) -> None:
        self.form = form
        self.section, self.section_end = (word.strip("\n") for word in form.section)
        self.call, self.call_end = (word.strip("\n") for word in form.call)
        self.key, self.key_end = (word.strip("\n") for word in form.key)
        self.is_json = not self.key
        self.value, self.value_end = (word.strip("\n") for word in form.value)
        if self.is_json:
            self.value_end = self.call_end
        self.name_end = form.name_end.strip("\n")
        self.padded = form.value[0].endswith("\n") and form.value[1].startswith("\n")
        """Whether a newline at each end of a value is padding."""
        outer = (self.section, self.section_end, self.call, self.call_end, self.key, self.value_end)
        every = [word for word in (*outer, self.value) if word]
        ends = (self.name_end, self.key_end)
        self.all = frozenset([*every, *ends]) - {""}
        in_characters = {word for word in self.all if mode.text_mode or word not in form.tags}
        spelled = [word for word in every if word in in_characters]
        name_end, key_end = (word if word in in_characters else "" for word in ends)
        self.spelled = {
            _Place.OUTSIDE: mode.outside(form.tags),
            _Place.SECTION: WordSet(spelled),
            _Place.NAME: WordSet([*spelled, name_end]),
            _Place.KEY: WordSet([*spelled, key_end]),
            _Place.GAP: WordSet(spelled),
            _Place.VALUE: WordSet(spelled if self.is_json else {self.value_end} & in_characters),
        }


class NativeReader(CallReader):
    """Reads the calls of one message."""

    def __init__(self, tools: ToolTable, tags: FormTags) -> None:
        self._tools = tools
        self._tags = tags
        self._place = _Place.OUTSIDE
        self._name = ""
        """Name of the call or parameter as far as read, at most one character over the limit."""
        self._num_calls = 0
        """Calls in the open section."""
        self._word = ""
        """Text of a boolean, which may be capitalised."""
        self._json: JsonCall | None = None
        """The open call, if its arguments are JSON and its name has ended."""

    @property
    def in_call(self) -> bool:
        """Whether a section is open: marks of reasoning inside are text."""
        return self._place is not _Place.OUTSIDE

    def tags(self) -> WordSet | None:
        """In a value only its closing string is a tag."""
        return self._tags.spelled[self._place]

    def on_text(self, text: str, out: list[ParseEvent]) -> None:
        """Handles part of a name or a value, blanks between them, or free text."""
        match self._place:
            case _Place.OUTSIDE:
                out.append(TextDelta(text))
            case _Place.NAME | _Place.KEY:
                self._name += text[: MAX_NAME_CHARACTERS + 1 - len(self._name)]
            case _Place.VALUE if self._json is not None:
                self._json.feed(text, out)
            case _Place.VALUE if self._is_boolean():
                self._word += text[: MAX_NAME_CHARACTERS - len(self._word)]
            case _Place.VALUE:
                assert self._call is not None
                self._call.add_text(text, out)
            case _:
                if not text.isspace():
                    self._fail("text outside of parameters", out)

    def on_foreign_control(self, out: list[ParseEvent]) -> None:
        """Handles a control token that is no tag. Outside of calls it is ignored."""
        if self._place is not _Place.OUTSIDE:
            self._fail("control token in a call", out)

    def on_tag(self, name: str, out: list[ParseEvent]) -> bool:
        """Handles one of the form's strings."""
        tags, place = self._tags, self._place
        if name not in tags.all:
            return False
        if place is _Place.NAME and name == tags.name_end:
            self._end_name(out)
        elif place is _Place.VALUE and name == tags.value_end:
            self._end_value(out)
        elif place is _Place.KEY and name == tags.key_end:
            self._end_key()
        elif place is _Place.GAP and name == tags.value:
            self._place = _Place.VALUE
        elif place is _Place.OUTSIDE:
            self._begin(name, out)
        else:
            self._end_unfinished(out)
            self._handle_structure(name, out)
        return True

    def end(self, out: list[ParseEvent]) -> None:
        """Ends the message: a call still open is malformed."""
        if self._place is not _Place.OUTSIDE:
            self._end_unfinished(out)
            self._end_section(f"unclosed {_shown(self._tags.section)}", out)

    def _begin(self, name: str, out: list[ParseEvent]) -> None:
        """Handles a string of the form outside of any call."""
        if name == self._tags.section:
            self._place, self._num_calls = _Place.SECTION, 0
            if not self._tags.call:
                self._begin_name()
        else:
            self._end_section(f"stray {_shown(name)}", out)

    def _begin_name(self) -> None:
        self._place, self._name, self._call = _Place.NAME, "", OpenCall("")

    def _handle_structure(self, name: str, out: list[ParseEvent]) -> None:
        """Handles a string of the form in a section or a call, unless it ends a name or a value."""
        tags, call = self._tags, self._call
        if name == tags.section:
            self._end_section(f"unclosed {_shown(name)}", out)
            self._begin(name, out)
        elif name == tags.call:
            if call is not None:
                self._fail(f"unclosed {printable(call.name) or _shown(name)}", out)
                self._finish(out)
            self._begin_name()
        elif name == tags.section_end:
            if call is not None and not tags.call:
                call.check_complete(self._tools.get(call.name, {}))
                self._finish(out)
            call = self._call
            error = "" if self._num_calls else "no call"
            self._end_section(f"unclosed {printable(call.name)}" if call is not None else error, out)
        elif name == tags.call_end and call is not None:
            call.check_complete(self._tools.get(call.name, {}))
            self._finish(out)
            self._place = _Place.SECTION
        elif name == tags.key and call is not None:
            self._place = _Place.KEY
            self._name = ""
        else:
            self._fail(f"stray {_shown(name)}", out)

    def _end_name(self, out: list[ParseEvent]) -> None:
        assert self._call is not None
        name, error = self._read_id(self._name.strip())
        self._place, self._call.name = _Place.SECTION, name
        if self._tags.is_json and not (error or self._call.error):
            self._json = JsonCall(self._tools)
            self._json.feed(f'{{"name": {json.dumps(name)}, "arguments": ', out)
            self._place, self._call = _Place.VALUE, self._json.call
            return
        call = self._start(self._call, out)
        if error:
            call.fail(error)
        elif name not in self._tools:
            call.fail(f"unknown tool {printable(name)}")

    def _read_id(self, text: str) -> tuple[str, str]:
        """The tool's name in the text of a call's name, and an error or ""."""
        before, behind = self._tags.form.id
        name, _, number = text.rpartition(behind) if behind else (text, "", "0")
        if not (text.startswith(before) and number.isdecimal()):
            return "", f"{printable(text)} is no {before}NAME{behind}NUMBER"
        name = name.removeprefix(before)
        return name, "" if name else "missing name"

    def _end_key(self) -> None:
        call, name = self._call, self._name.strip()
        assert call is not None
        if call.name in self._tools and name not in self._tools[call.name]:
            call.reject(f"unknown parameter {printable(name)}")
        elif name in call.arguments:
            call.fail(f"repeated {printable(name)}")
        call.open_body(name, self._tags.padded)
        self._word = ""
        self._place = _Place.GAP if self._tags.value else _Place.VALUE

    def _is_boolean(self) -> bool:
        """Whether the open value is a boolean that may be capitalised."""
        parameter = self._parameter()
        return self._tags.form.python_words and parameter is not None and parameter.kind == "boolean"

    def _end_value(self, out: list[ParseEvent]) -> None:
        if self._json is not None:
            self._json.feed("}", out)
            self._finish(out)
            self._place = _Place.SECTION
            return
        call, parameter = self._call, self._parameter()
        assert call is not None
        if self._is_boolean():
            word = self._word.strip()
            call.add_text(word.lower() if word in ("True", "False") else word, out)
        call.close_body()
        self._place = _Place.SECTION
        if parameter is None or parameter.required or parameter.kind == "string":
            return
        if call.arguments.get(parameter.name, "").strip() in _NULLS:
            del call.arguments[parameter.name]

    def _parameter(self) -> Parameter | None:
        """The schema of the parameter whose value is open."""
        assert self._call is not None
        return self._tools.get(self._call.name, {}).get(self._call.parameter or "")

    def _end_unfinished(self, out: list[ParseEvent]) -> None:
        """Ends a name or parameter that another string, or the message's end, cut short."""
        if self._place is _Place.NAME:
            if self._tags.name_end:
                self._fail(f"unclosed {_shown(self._tags.call)}", out)
            self._end_name(out)
        elif self._place in (_Place.KEY, _Place.GAP, _Place.VALUE):
            assert self._call is not None
            open_name = self._call.name if self._json else self._call.parameter or self._name.strip()
            self._call.fail(f"unclosed {printable(open_name)}")
            self._call.parameter = None
            self._place = _Place.SECTION

    def _fail(self, message: str, out: list[ParseEvent]) -> None:
        """Records the first error of the open call; opens a call if there is none."""
        call = self._call or self._start(OpenCall(""), out)
        call.fail(message)

    def _end_section(self, error: str, out: list[ParseEvent]) -> None:
        if error:
            self._fail(error, out)
        if self._call is not None:
            self._finish(out)
        self._place = _Place.OUTSIDE

    def _finish(self, out: list[ParseEvent]) -> None:
        if self._json is not None:
            self._json.finish(out)
            self._json = None
        super()._finish(out)
        self._num_calls += 1


def _shown(tag: str) -> str:
    """A string of the form as errors name it."""
    return tag.strip('<>=|" ').removesuffix(" name")
