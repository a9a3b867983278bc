"""Calls as a published family writes them: any `CallForm`, rendered and read.

Strings become the text between the words around a value, as they are; any other value its JSON, which the
tools check. The model's own chat template announces the tools (`Renderer.describe`).

Words of the form that are tokens are only recognised as tokens, so a value may hold their characters. The
others are recognised in characters, in values the one that closes them: a value that contains it ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from etude.records import ToolCall
from etude.tokens.grammar.call_forms import CALL_FORMS, CallForm
from etude.tokens.grammar.hermes import HermesGrammar
from etude.tokens.grammar.interface import ToolSchema, check_names
from etude.tokens.grammar.message_parser import CallReader, Grammar, ParserMode
from etude.tokens.grammar.native_reader import FormTags, NativeReader
from etude.tokens.pieces import Piece, join_text

_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}


class NativeGrammar(Grammar):
    """One form for a fixed set of tools. Raises ConfigError for names that cannot be written."""

    def __init__(self, form: CallForm, tools: Sequence[ToolSchema]) -> None:
        check_names(tools, ("<", ">", '"', "\n"))
        super().__init__(form.name, tools, form.tags)
        self.form = form

    def announce(self, schemas: Sequence[ToolSchema]) -> None:
        """The model's own chat template does."""

    def render_calls(self, calls: Sequence[ToolCall], behind_words: bool) -> list[Piece]:
        """All calls of an answer, with what stands between them and before the first."""
        form = self.form
        opened, closed = form.section
        pieces: list[Piece] = []
        for call in calls:
            if form.between and pieces:
                pieces += self.split(closed + form.between + opened)
            pieces += self._render_call(call)
        return join_text([*self.split(form.lead[behind_words] + opened), *pieces, *self.split(closed)])

    def _render_call(self, call: ToolCall) -> list[Piece]:
        form = self.form
        kinds = {name: parameter.kind for name, parameter in self._table.get(call.name, {}).items()}
        pieces: list[Piece] = [*self.split(form.call[0]), call.name, *self.split(form.name_end)]
        for name, text in call.arguments.items():
            if form.python_words and kinds.get(name, "string") != "string":
                text = _PYTHON_WORDS.get(text, text)
            pieces += [*self.split(form.key[0]), name, *self.split(form.key[1] + form.value[0])]
            pieces += [text, *self.split(form.value[1])]
        return [*pieces, *self.split(form.call[1])]

    def _reader(self, mode: ParserMode) -> Callable[[], CallReader]:
        return partial(NativeReader, self._table, FormTags(self.form, mode))


TOLD_GRAMMARS: Mapping[str, Callable[[Sequence[ToolSchema]], Grammar]] = {
    **{form.name: partial(NativeGrammar, form) for form in CALL_FORMS},
    "hermes_told": partial(HermesGrammar, told_by_template=True),
}
"""Those whose tools the model's own chat template announces, by name."""
