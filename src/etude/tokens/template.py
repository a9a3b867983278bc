"""Chat templates as data: the control tokens and text around the messages of user, tools and agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from etude.tokens.grammar.channels import CHANNEL, PART_END, REASONING_HEADER, THINK_CLOSE, THINK_OPEN
from etude.tokens.pieces import Control, Piece


@dataclass(frozen=True, slots=True, repr=False)
class Template:
    """The frame of a conversation. The agent's own messages end with `end`, which is sampled."""

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
    """Ends every message; with `only_answers_end` only the agent's."""
    after_end: tuple[Piece, ...] = ()
    """Between `end` and the next message."""
    extra: tuple[str, ...] = ()
    """Further control tokens of a tokenizer for this template, padding first."""
    begin: tuple[Piece, ...] = ()
    """Before the first message."""
    result_between: tuple[Piece, ...] = ()
    """Between two results of one turn."""
    default_system: str | None = None
    """System message of a conversation without one, possibly empty; None: no system message then."""
    only_answers_end: bool = False
    """Whether messages other than the agent's have no end of their own: they end where the next begins."""
    thinking: tuple[Piece, ...] = ()
    """After `assistant` in a prompt: opens reasoning, with which every sampled answer begins."""
    shown: tuple[Piece, ...] = ()
    """After `assistant`, before an answer that was not sampled and has no reasoning."""
    shown_end: Control | None = None
    """Ends every message except sampled ones, if these end with another token."""
    system_close: tuple[Piece, ...] = ()
    """After the text of a system message."""
    joins_system: bool = False
    """Whether the system message, opened by `system`, is the beginning of the first user message."""
    openers_end: bool = False
    """Whether an answer ends with the token that opens the next message, of `user` or of `tool`: a sampled
    one is not written again."""
    result_named: tuple[Piece, ...] = ()
    """If the name and number of a result's call follow `tool` and `result_between`: the pieces after
    these."""
    default_close: tuple[Piece, ...] = ()
    """After the default system message only."""

    def __repr__(self) -> str:
        """Includes the last fields only if they are set, so that digests of older templates stay the same."""
        later = {field.name: field.default for field in fields(self)[10:]}
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        shown = ", ".join(f"{name}={value!r}" for name, value in values if value != later.get(name, ...))
        return f"Template({shown})"

    @property
    def ends(self) -> tuple[Control, ...]:
        """The tokens that end an answer: `end`, or with `openers_end` the opener of user messages and then
        that of results."""
        openers = (self.user[0], self.tool[0]) if self.openers_end else ()
        return tuple(dict.fromkeys([self.end, *(token for token in openers if isinstance(token, Control))]))

    @property
    def closing(self) -> tuple[Piece, ...]:
        """Ends messages other than the agent's; `after_end` follows."""
        return () if self.only_answers_end else (self.shown_end or self.end,)

    @property
    def before(self) -> Piece:
        """The last piece before a message that is not the first."""
        return (self.end, *self.after_end)[-1]

    @property
    def prompt(self) -> tuple[Piece, ...]:
        """Opens an answer to be sampled: the last pieces before sampling begins."""
        return (*self.assistant, *self.thinking)

    @property
    def has_channels(self) -> bool:
        """Whether answers consist of parts, each with a header that says whether it is reasoning."""
        return CHANNEL in self.shown

    @property
    def reasoning_open(self) -> tuple[Piece, ...]:
        """After `assistant`, before reasoning."""
        own = REASONING_HEADER if self.has_channels else self._around_reasoning[0]
        return self.thinking or own

    @property
    def reasoning_close(self) -> tuple[Piece, ...]:
        """Between the reasoning and the text of an answer."""
        if self.has_channels:
            return (PART_END, *self.assistant, *self.shown)
        return self._around_reasoning[1]

    @property
    def _around_reasoning(self) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """The pieces that open and close reasoning: those of empty reasoning in `shown`, or else Qwen's."""
        if not self.shows_empty_reasoning:
            return (Control(THINK_OPEN), "\n"), ("\n", Control(THINK_CLOSE), "\n\n")
        place = self.shown.index(Control(THINK_CLOSE))
        return self.shown[:place], self.shown[place:]

    @property
    def shows_empty_reasoning(self) -> bool:
        """Whether an answer without reasoning is shown with empty marks of reasoning."""
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
"""One token per mark, nothing else: the shortest possible frame."""

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
"""The template that Qwen models were trained with."""

QWEN3_TEMPLATE = replace(
    CHATML_TEMPLATE,
    name="qwen3",
    result_open=("\n", Control("<tool_response>"), "\n"),
    result_close=("\n", Control("</tool_response>")),
)
"""The same, for tokenizers that hold `<tool_response>` as one token: Qwen3's."""


def plain_template(begin: str, end: str) -> Template:
    """A template in plain text, for tokenizers that have only begin and end tokens."""
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
