"""Derives a `Template` from a model's chat template: probe conversations are rendered, and the text between
their messages' contents is the frame.

    <|im_start|>system\\n SYSTEM <|im_end|>\\n<|im_start|>user\\n USER <|im_end|>\\n<|im_start|>assistant\\n
    └─ begin, system ──┘        └─── end, after_end, user ───┘      └── end, after_end, assistant ──┘

The result is then checked against the chat template on conversations of many shapes. A chat template is
refused if it does not render message by message, so that a prompt would not be the earlier prompt, its answer
and the new messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from etude.errors import ConfigError
from etude.tokens.call_probes import (
    ANSWER,
    FIRST,
    PROBE_CALL,
    PROBE_TOOLS,
    SECOND,
    SYSTEM,
    USER,
    chat_message,
    matches_grammar,
    names_its_call,
    probe_calls,
    probe_results,
)
from etude.tokens.chat_template import ChatTemplate, Message, write_chat_template
from etude.tokens.grammar import HermesGrammar
from etude.tokens.grammar.channels import CHANNEL, THINK_CLOSE, THINK_OPEN
from etude.tokens.grammar.native import ANNOUNCED_GRAMMARS
from etude.tokens.pieces import Control, Piece, join_text, spell
from etude.tokens.template import CHATML_TEMPLATE, QWEN3_TEMPLATE, Template
from etude.tokens.tokenizer import Tokenizer

_BARE = Template("derived", (), (), (), (), (), (), Control(""))
_TEXTS = (
    "plain words",
    "two\nlines, the second of which ends here",
    "ß 🙂 漢字 عربى",
    '{"a": [true, false, null]}',
    "<b>1 < 2</b> {{ braces }} {% if %}",
)


def derive_template(tokenizer: Tokenizer, in_any_form: bool = True) -> tuple[Template, Tokenizer, str]:
    """The frame of a tokenizer's chat template, with calls `in_any_form` or else only as Hermes writes them.

    Also returns the tokenizer, whose chat template renders tools, calls and results as our sessions do (the
    model's own if it does so, else one generated for this frame), and the grammar of the calls that it
    writes: `hermes`, or one whose tools the model's own chat template announces.

    Raises ConfigError for a chat template that no frame describes, or with unknown control tokens.
    """
    jinja = ChatTemplate(tokenizer.chat_template, tokenizer.template_variables, read=tokenizer.strip_blanks)
    reader = _Reader(jinja, tokenizer)
    template = reader.frame()
    with_results = reader.results(template)
    # Without a role for results they are user messages, as in Qwen's templates.
    by_user = replace(
        template,
        tool=tuple(join_text((*template.user, "<tool_response>\n"))),
        result_close=("\n</tool_response>",),
        result_between=("\n<tool_response>\n",),
    )
    names_calls = with_results is not None and bool(with_results.result_named)
    template = by_user if with_results is None or names_calls else with_results
    written = ChatTemplate(write_chat_template(template), {})
    for messages in _probes():
        # Some put the system message into the last user message: here it stays in the first.
        if not (template.joins_system and messages[0]["role"] == "system" and len(messages) > 2):
            _check_alike(jinja, written, messages)
    known = (frame for frame in (QWEN3_TEMPLATE, CHATML_TEMPLATE) if _layout(frame) == _layout(template))
    template = next(known, template)
    if with_results is not None and not jinja.needs_clock:
        others = ANNOUNCED_GRAMMARS.values() if in_any_form else ()
        own = with_results if names_calls else template
        for grammar in (HermesGrammar(PROBE_TOOLS), *(make(PROBE_TOOLS) for make in others)):
            if matches_grammar(jinja, written, reader.pieces, tokenizer, grammar, own):
                return own, tokenizer, grammar.name
    return template, tokenizer.with_chat_template(write_chat_template(template)), "hermes"


class _Reader:
    """Extracts the parts of a frame from rendered probes."""

    def __init__(self, jinja: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._jinja = jinja
        names = sorted(tokenizer.added_tokens, key=len, reverse=True)
        self._split: Callable[[str], list[str]] = re.compile(f"({'|'.join(map(re.escape, names))})").split
        self._names = frozenset(names)

    def frame(self) -> Template:
        """The frame without the parts around results."""
        user, answer = chat_message("user", USER), chat_message("assistant", ANSWER)
        opened, to_user, to_answer = self._between([chat_message("system", SYSTEM), user], SYSTEM, USER)
        bare, prompt = self._between([user], USER)
        _, to_said, after_said, again = self._between(
            [user, answer, chat_message("user", FIRST)], USER, ANSWER, FIRST
        )
        thinking = prompt[len(to_said) :] if prompt.startswith(to_said) else ""
        shown = to_said[len(prompt) :] if to_said.startswith(prompt) else ""
        unopened = prompt.removesuffix(THINK_OPEN)
        if unopened != prompt and to_said.startswith(unopened) and THINK_CLOSE in to_said:
            thinking, shown = THINK_OPEN, to_said.removeprefix(unopened)
        is_alike = prompt == to_said or thinking == f"{THINK_OPEN}\n"
        is_alike = is_alike or any(mark in shown for mark in (CHANNEL.name, THINK_CLOSE))
        is_alike = is_alike and prompt == to_answer == again
        joins = opened == bare and self._is_text(to_user)
        if not (is_alike and (joins or after_said.endswith(to_user) or to_user.endswith(after_said))):
            raise _unstable(
                f"prompts open an answer with {prompt!r}; an earlier one is between {to_said!r} and "
                f"{after_said!r}, and a system message is before {to_user!r}"
            )
        to_answer = prompt.removesuffix(thinking)
        is_opener = after_said == to_user and bare.endswith(to_user)
        if joins:
            template = self._joined(after_said, to_answer, bare, to_user)
        elif is_opener and self.pieces(to_user)[:1] != self.pieces(to_answer)[:1]:  # it ends answers
            begin = bare.removesuffix(to_user)
            template = self._unended(begin, to_user, to_answer, "")
            template = replace(template, system=self.pieces(opened.removeprefix(begin)))
        elif len(after_said) > len(to_user):
            template = self._unended(opened, to_user, to_answer, after_said.removesuffix(to_user))
        else:
            template = self._alike(opened, after_said, to_answer, bare)
            close = self.pieces(to_user.removesuffix(after_said))
            template = replace(template, system_close=close)
        template = replace(template, thinking=self.pieces(thinking), shown=self.pieces(shown))
        if not template.has_channels:
            return template
        _, last = self._between([user, answer], ANSWER, prompts=False)
        (end, *_) = self._ended(last)
        return replace(template, end=end, shown_end=template.end)

    def _joined(self, to_user: str, to_answer: str, bare: str, between: str) -> Template:
        """The frame if the system message begins the first user message."""
        ended = self._ended(to_user)
        if self.pieces(to_answer)[:1] == ended[:1]:
            template = self._alike(bare, to_user, to_answer, bare)
        else:
            user = self.pieces(bare)[-1:]
            begin = bare.removesuffix(spell(user))
            template = self._unended(begin, spell(user), to_answer, to_user.removesuffix(spell(user)))
        return replace(template, system=template.user, system_close=self.pieces(between), joins_system=True)

    def _is_text(self, frame: str) -> bool:
        return all(isinstance(piece, str) for piece in self.pieces(frame))

    def _alike(self, opened: str, to_user: str, to_answer: str, bare: str) -> Template:
        """The frame if all messages end with the same token."""
        ended, answer_ended = self._ended(to_user), self._ended(to_answer)
        end, user_pieces, answer_pieces = ended[0], ended[1:], answer_ended[1:]
        num_plain = next(
            (n for n, piece in enumerate(user_pieces) if isinstance(piece, Control)), len(user_pieces)
        )
        after_end, user_pieces = user_pieces[:num_plain], user_pieces[num_plain:]
        if not user_pieces:  # plain text opens messages, and the first message shows which part of it
            words = spell(after_end)
            lead = words[: next(n for n in range(len(words) + 1) if bare.endswith(words[n:]))]
            after_end, user_pieces = self.pieces(lead), self.pieces(words.removeprefix(lead))
            answer_pieces = self.pieces(spell(answer_pieces).removeprefix(lead))
        else:
            answer_pieces = answer_pieces[num_plain:]
        system = self.pieces(opened)
        if not (user_pieces and answer_pieces and system):
            raise _unstable("messages begin with neither control tokens nor distinct words")
        before = bare.removesuffix(spell(user_pieces))
        default, found, closed = before.removeprefix(opened).partition(end.name)
        has_default = bool(found) and bare.startswith(opened) and closed.startswith(spell(after_end))
        default_close = closed.removeprefix(spell(after_end)) if has_default else ""
        if opened.startswith(before):
            begin, system = self.pieces(before), self.pieces(opened.removeprefix(before))
        elif user_pieces[0] in system:
            start = system.index(user_pieces[0])
            begin, system = system[:start], system[start:]
        else:  # if there is always a system message, the text before it belongs to its opener
            begin = () if has_default else self.pieces(before)
            system = system[len(begin) :]
        return replace(
            _BARE,
            system=system,
            user=user_pieces,
            assistant=answer_pieces,
            end=end,
            after_end=after_end,
            begin=begin,
            default_system=default if has_default else None,
            default_close=self.pieces(default_close),
        )

    def _unended(self, opened: str, user: str, answer: str, ended: str) -> Template:
        """The frame if answers end with a token, or with the opener of the next message, and other messages
        where the next one begins."""
        (end, *_) = self._ended(ended or user)
        return replace(
            _BARE,
            user=self._ended(user),
            assistant=self._ended(answer),
            end=end,
            begin=self.pieces(opened),
            only_answers_end=True,
            openers_end=not ended,
        )

    def results(self, template: Template) -> Template | None:
        """The template with the parts around results; None if it has no role for results, or if results name
        their call other than by name and number."""
        found = self._results(template, is_numbered=False)
        numbered = found or self._results(template, is_numbered=True)
        return numbered if found or (numbered and numbered.result_named) else None

    def _results(self, template: Template, *, is_numbered: bool) -> Template | None:
        calls = probe_calls(2, is_numbered)
        start = [chat_message("user", USER), {**chat_message("assistant", ANSWER), "tool_calls": calls}]
        try:
            messages = [*start, *probe_results(calls, [FIRST, SECOND], is_numbered)]
            _, _, opened, between, rest = self._between(messages, USER, ANSWER, FIRST, SECOND)
            if template.openers_end:
                _, _, called, _ = self._between([*start, chat_message("user", FIRST)], USER, ANSWER, FIRST)
                called = called.removesuffix(spell(template.user))
                found, opened = opened.startswith(called), opened.removeprefix(called)
                self._ended(opened)
            else:
                _, found, opened = opened.partition((template.shown_end or template.end).name)
        except ConfigError:
            return None
        closed = spell((*template.closing, *template.after_end, *template.prompt))
        lead = spell(template.after_end)
        close = rest.removesuffix(closed)
        if not (found and opened.startswith(lead) and rest.endswith(closed) and between.startswith(close)):
            return None
        opened, between = opened.removeprefix(lead), between.removeprefix(close)
        # The text after the call's name and number, if a result names its call.
        opened, is_named, named = opened.partition(f"{PROBE_CALL.name}:0")
        between = between.removesuffix(f"{PROBE_CALL.name}:1{named}") if is_named else between
        if any(names_its_call(part) for part in (opened, named, between, close)):
            return None
        return replace(
            template,
            tool=self.pieces(opened),
            result_close=self.pieces(close),
            result_between=self.pieces(between),
            result_named=self.pieces(named),
        )

    def _between(self, messages: Sequence[Message], *words: str, prompts: bool = True) -> list[str]:
        """The text before, between and after `words`. Raises ConfigError if one is missing."""
        text = self._jinja.render(messages, prompts=prompts)
        found: list[str] = []
        for word in words:
            before, is_there, text = text.partition(word)
            if not is_there:
                raise _unstable(f"a message is missing: {messages}")
            found.append(before)
        return [*found, text]

    def _ended(self, text: str) -> tuple[Control, *tuple[Piece, ...]]:
        """The pieces of a text that must begin with a control token, which ends or opens a message."""
        first, *rest = self.pieces(text) or ("",)
        if not isinstance(first, Control):
            raise ConfigError(
                "ends messages with text that is not a control token of the tokenizer",
                field="chat_template",
                received=text[:40],
                fix="use the tokenizer of the model that the template belongs to, with its special tokens; "
                'or agent.template = "plain", which opens messages with words',
            )
        return (first, *rest)

    def pieces(self, text: str) -> tuple[Piece, ...]:
        """Rendered text, split into text and control tokens."""
        return tuple(join_text(Control(part) if part in self._names else part for part in self._split(text)))


def _unstable(why: str) -> ConfigError:
    return ConfigError(
        f"does not render conversations message by message: {why}",
        field="chat_template",
        fix='agent.template = "plain" opens messages with words, which the model learns by fine-tuning; or '
        'name the frame that it was trained with, such as "chatml"',
    )


def _probes() -> Iterator[list[Message]]:
    """Conversations of user messages and answers: with and without a system message, of one to four turns."""
    for number, text in enumerate(_TEXTS):
        following = _TEXTS[number + 1 :] + _TEXTS[:number]
        for system in ((), (chat_message("system", following[0]),)):
            for num_answers in range(4):
                turns = [
                    message
                    for words in following[:num_answers]
                    for message in (chat_message("assistant", words), chat_message("user", text))
                ]
                yield [*system, chat_message("user", text), *turns]


def _check_alike(jinja: ChatTemplate, written: ChatTemplate, messages: Sequence[Message]) -> None:
    """Raises ConfigError if chat template and frame render a conversation differently."""
    rendered, framed = jinja.render(messages), written.render(messages)
    if rendered == framed:
        return
    place = next((n for n, (a, b) in enumerate(zip(rendered, framed, strict=False)) if a != b), len(framed))
    raise _unstable(
        f"{rendered[place - 20 : place + 40]!r} appears where {framed[place - 20 : place + 40]!r} is expected"
    )


def _layout(template: Template) -> tuple[str, ...]:
    """All that decides a conversation's tokens, independent of how results are divided into parts."""
    first = (*template.tool, *template.result_open)
    between = (*template.result_close, *template.result_between, *template.result_open)
    last = (*template.result_close, *template.closing, *template.after_end)
    ends = (template.end, *template.after_end)
    answers = (template.assistant, template.thinking, template.shown)
    named = (template.result_named, template.default_close)
    parts = (template.begin, template.system, template.user, *answers, first, between, last, ends, *named)
    return (*(repr(join_text(part)) for part in parts), repr(template.default_system))
