"""How messages are framed: the control tokens and words around what people, tools and the agent say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from etude.tokens.grammar.channels import CHANNEL, PART_END, REASONING_HEADER, THINK_CLOSE, THINK_OPEN
from etude.tokens.pieces import Control, Piece


@dataclass(frozen=True, slots=True, repr=False)
class Template:
    """The frame of a conversation. `end` is what the agent's own message ends with: it is sampled."""

    name: str
    system: tuple[Piece, ...]
    """Opens a system message."""
    user: tuple[Piece, ...]
    assistant: tuple[Piece, ...]
    """Opens the agent's message."""
    tool: tuple[Piece, ...]
    """Opens the message that holds all results of one turn."""
    result_open: tuple[Piece, ...]
    result_close: tuple[Piece, ...]
    end: Control
    """Ends every message; with `only_answers_end` the agent's alone."""
    after_end: tuple[Piece, ...] = ()
    """Stands between `end` and the next message."""
    extra: tuple[str, ...] = ()
    """Control tokens that a tokenizer of this template has besides those above, padding first."""
    begin: tuple[Piece, ...] = ()
    """Stands before the first message."""
    result_between: tuple[Piece, ...] = ()
    """Stands between two results of one turn."""
    default_system: str | None = None
    """The system's words where a conversation has none, perhaps empty; None: no system message then."""
    only_answers_end: bool = False
    """Whether messages that are not the agent's end where the next one begins."""
    thinking: tuple[Piece, ...] = ()
    """Stands behind `assistant` in a prompt and opens reasoning, with which every sampled answer begins."""
    shown: tuple[Piece, ...] = ()
    """Stands behind `assistant` before an answer that was not sampled and has no reasoning."""
    shown_end: Control | None = None
    """Ends every message but a sampled one, where that ends with another token."""
    system_close: tuple[Piece, ...] = ()
    """Stands behind the words of a system message."""
    joins_system: bool = False
    """Whether the system's words, as `system` opens them, are the beginning of the user's first message."""
    openers_end: bool = False
    """Whether an answer ends with the token that opens what follows, of `user` or of `tool`: the one that was
    sampled is not written again."""
    result_named: tuple[Piece, ...] = ()
    """Where `tool` and `result_between` go on with the name and number of the call that a result answers:
    what stands behind these."""
    default_close: tuple[Piece, ...] = ()
    """Stands behind a system message with the default words, and behind no other one."""

    def __repr__(self) -> str:
        """Names the last fields only where they are set: digests of older templates stay the same."""
        later = {field.name: field.default for field in fields(self)[10:]}
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        shown = ", ".join(f"{name}={value!r}" for name, value in values if value != later.get(name, ...))
        return f"Template({shown})"

    @property
    def ends(self) -> tuple[Control, ...]:
        """The tokens of which one ends an answer: `end`, or with `openers_end` the user's and then that of
        results."""
        openers = (self.user[0], self.tool[0]) if self.openers_end else ()
        return tuple(dict.fromkeys([self.end, *(one for one in openers if isinstance(one, Control))]))

    @property
    def closing(self) -> tuple[Piece, ...]:
        """Ends messages that are not the agent's; `after_end` follows."""
        return () if self.only_answers_end else (self.shown_end or self.end,)

    @property
    def before(self) -> Piece:
        """The last piece before a message that is not the first."""
        return (self.end, *self.after_end)[-1]

    @property
    def prompt(self) -> tuple[Piece, ...]:
        """Opens an answer that is to be sampled: the last thing before sampling begins."""
        return (*self.assistant, *self.thinking)

    @property
    def has_channels(self) -> bool:
        """Whether answers come in parts, each with a header that says whether it is reasoning."""
        return CHANNEL in self.shown

    @property
    def reasoning_open(self) -> tuple[Piece, ...]:
        """Stands behind `assistant` before reasoning."""
        own = REASONING_HEADER if self.has_channels else self._around_reasoning[0]
        return self.thinking or own

    @property
    def reasoning_close(self) -> tuple[Piece, ...]:
        """Stands between reasoning and the words of an answer."""
        if self.has_channels:
            return (PART_END, *self.assistant, *self.shown)
        return self._around_reasoning[1]

    @property
    def _around_reasoning(self) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """What opens and closes reasoning: as answers without any show it empty, or else as Qwen's do."""
        if not self.shows_empty_reasoning:
            return (Control(THINK_OPEN), "\n"), ("\n", Control(THINK_CLOSE), "\n\n")
        place = self.shown.index(Control(THINK_CLOSE))
        return self.shown[:place], self.shown[place:]

    @property
    def shows_empty_reasoning(self) -> bool:
        """Whether an answer without reasoning is shown with the marks of one."""
        return Control(THINK_CLOSE) in self.shown

    @property
    def control_tokens(self) -> list[str]:
        """Names of all control tokens, in the order in which a new tokenizer gets them."""
        opened = (self.system, self.user, self.assistant, self.tool, self.result_open, self.result_close)
        shown = (self.shown, (self.shown_end,) if self.shown_end else (), self.system_close)
        parts = (self.begin, *opened, self.result_between, self.result_named, self.thinking, *shown)
        names = [piece.name for part in parts for piece in part if isinstance(piece, Control)]
        return list(dict.fromkeys([*self.extra, self.end.name, *names]))


ETUDE_TEMPLATE = Template(
    name="etude",
    system=(Control("<|system|>"),),
    user=(Control("<|user|>"),),
    assistant=(Control("<|assistant|>"),),
    tool=(Control("<|tool|>"),),
    result_open=(Control("<result>"),),
    result_close=(Control("</result>"),),
    end=Control("<|end|>"),
    extra=("<|pad|>",),
)
"""One token per mark, nothing else: the shortest frame there is."""

CHATML_TEMPLATE = Template(
    name="chatml",
    system=(Control("<|im_start|>"), "system\n"),
    user=(Control("<|im_start|>"), "user\n"),
    assistant=(Control("<|im_start|>"), "assistant\n"),
    tool=(Control("<|im_start|>"), "user"),
    result_open=("\n<tool_response>\n",),
    result_close=("\n</tool_response>",),
    end=Control("<|im_end|>"),
    after_end=("\n",),
)
"""The frame that Qwen models were trained with."""

QWEN3_TEMPLATE = replace(
    CHATML_TEMPLATE,
    name="qwen3",
    result_open=("\n", Control("<tool_response>"), "\n"),
    result_close=("\n", Control("</tool_response>")),
)
"""The same, for tokenizers that hold `<tool_response>` as one token: Qwen3's."""


def plain_template(begin: str, end: str) -> Template:
    """A frame in words, for tokenizers that have only the tokens at the ends of texts."""
    return Template(
        name="plain",
        system=("### System:\n",),
        user=("### User:\n",),
        assistant=("### Assistant:\n",),
        tool=("### User:\n<tool_response>\n",),
        result_open=(),
        result_close=("\n</tool_response>",),
        result_between=("\n<tool_response>\n",),
        end=Control(end),
        begin=(Control(begin),),
    )


TEMPLATES: Mapping[str, Template] = {
    template.name: template for template in (ETUDE_TEMPLATE, CHATML_TEMPLATE, QWEN3_TEMPLATE)
}
