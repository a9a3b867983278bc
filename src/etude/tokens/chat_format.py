"""How a model is spoken to: the one place where that is chosen.

    tokenizer, its chat template, [agent] --choose_format--> ChatFormat --renderer--> tokens of every session

Training, evaluation, serving, recording and the agent all take what is chosen here, so that a model reads in
use what it read in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from etude.config import GrammarName, TemplateName
from etude.errors import ConfigError
from etude.tokens.chat.shelf import RendererShelf
from etude.tokens.chat_template import write_chat_template
from etude.tokens.derived import derive_template
from etude.tokens.grammar import Grammar, HermesGrammar, ToolSchema, XmlGrammar
from etude.tokens.grammar.native import TOLD_GRAMMARS
from etude.tokens.renderer import Renderer, digest_format
from etude.tokens.template import (
    CHATML_TEMPLATE,
    ETUDE_TEMPLATE,
    QWEN3_TEMPLATE,
    TEMPLATES,
    Template,
    plain_template,
)
from etude.tokens.tokenizer import Tokenizer

_GRAMMARS: Mapping[str, Callable[[Sequence[ToolSchema]], Grammar]] = {
    "hermes": HermesGrammar,
    "xml": XmlGrammar,
    **TOLD_GRAMMARS,
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How one model is spoken to. Holds what tools look like, and none of their code.

    Earlier reasoning stays where it was sampled: no session renders it again.
    """

    tokenizer: Tokenizer
    """With the chat template that others need to speak to the model in the same way, where it has one."""
    template: Template
    grammar: str
    """`hermes`, `xml`, or one of those whose tools the model's own chat template announces."""
    tools: tuple[ToolSchema, ...] = ()
    """The agent's own."""
    system: str | None = None
    """Words of a system message that also tells the tools. None: there is none, as for models that were
    trained with these tools from the start."""

    @property
    def is_own(self) -> bool:
        """Whether it is Étude's own format, with every mark a token of its own."""
        return self.template is ETUDE_TEMPLATE and self.grammar == "xml"

    @property
    def digest(self) -> str:
        """BLAKE3 hex digest: formats with equal digests render equal tokens."""
        described = (self.tokenizer.digest, self.template, self.grammar, self.tools, self.system)
        return digest_format(self.tokenizer, _GRAMMARS[self.grammar](()), *described)

    def renderer(self) -> Renderer:
        """The renderer of the agent's sessions. Raises ConfigError for tools that the grammar refuses, or of
        which the tokenizer holds some tags and lacks others."""
        renderer = Renderer(self.tokenizer, _GRAMMARS[self.grammar](self.tools), self.template)
        if self.system is not None:
            renderer.system = renderer.describe(self.system, self.tools)
        return renderer

    def shelf(self) -> RendererShelf:
        """Renderers for conversations whose tools the client brings."""
        return RendererShelf(self.tokenizer, _GRAMMARS[self.grammar], self.template)


def choose_format(
    tokenizer: Tokenizer, template: TemplateName = "auto", grammar: GrammarName = "auto"
) -> ChatFormat:
    """The format of a tokenizer's model, without tools.

    `auto`: Étude's own frame where the tokenizer has its control tokens; else what the model's chat template
    says; without one, ChatML where the tokenizer has its tokens. `model`: what the chat template says. Calls
    are tags of their own in Étude's frame; in any other what the chat template writes, or where it announces
    no tools, or writes calls in no known form, JSON as Hermes and Qwen write it.

    Raises ConfigError where none fits, for a chat template that no frame describes, and for a name that
    there is not.
    """
    for field, name, known in (("template", template, TemplateName), ("grammar", grammar, GrammarName)):
        if name not in get_args(known):
            raise ConfigError(
                "is not a valid choice", field=f"agent.{field}", received=name, fix=", ".join(get_args(known))
            )
    found, spoken, calls = _choose_template(tokenizer, template, grammar == "auto")
    if found is not ETUDE_TEMPLATE:
        # Other programs, which read the exported checkpoint, are to end answers where sessions did.
        spoken = spoken.ending_with([spoken.control_id(one.name) for one in found.ends])
        if not spoken.chat_template:
            spoken = spoken.with_chat_template(write_chat_template(found))
    if found is ETUDE_TEMPLATE and not tokenizer.has_control("<tool_call>"):
        calls = "xml"
    return ChatFormat(spoken, found, calls if grammar == "auto" else grammar)


def _choose_template(tokenizer: Tokenizer, name: str, in_any_form: bool) -> tuple[Template, Tokenizer, str]:
    """The frame, the tokenizer with a chat template that goes with it, and the grammar of its calls: with
    `in_any_form` whatever the chat template of the model writes, else that of Hermes."""
    if name == "auto":
        known = [ETUDE_TEMPLATE, *([] if tokenizer.chat_template else (QWEN3_TEMPLATE, CHATML_TEMPLATE))]
        fitting = next((one for one in known if not _missing(tokenizer, one)), None)
        name = fitting.name if fitting is not None else "model"
    if name == "model":
        if not tokenizer.chat_template:
            raise ConfigError(
                "the model has no chat template, and its tokenizer none of the control tokens of a known one",
                field="agent.template",
                received=", ".join(tokenizer.control_tokens[:8]) or "no control tokens",
                fix="put the chat_template.jinja of the model beside its tokenizer.json; or "
                'agent.template = "plain", which the model learns by fine-tuning',
            )
        return derive_template(tokenizer, in_any_form)
    if name == "plain":
        template = _plain(tokenizer)
        return template, tokenizer.with_chat_template(write_chat_template(template)), "hermes"
    template = TEMPLATES[name]
    if missing := _missing(tokenizer, template):
        raise ConfigError(
            "the tokenizer lacks control tokens of the template",
            field="agent.template",
            received=f"{name}: {', '.join(missing)}",
            fix="name the template that the model was trained with",
        )
    return template, tokenizer, "hermes"


def _plain(tokenizer: Tokenizer) -> Template:
    """Raises ConfigError for a tokenizer that does not say which token ends a text."""
    named = tokenizer.template_variables
    end = named.get("eos_token", "")
    if not tokenizer.has_control(end):
        raise ConfigError(
            "the tokenizer names no token that ends a text",
            field="tokenizer_config.json: eos_token",
            received=end,
            fix="name it there",
        )
    begin = named.get("bos_token", end)
    return plain_template(begin if tokenizer.has_control(begin) else end, end)


def _missing(tokenizer: Tokenizer, template: Template) -> list[str]:
    return [name for name in template.control_tokens if not tokenizer.has_control(name)]
