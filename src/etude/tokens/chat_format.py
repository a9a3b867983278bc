"""The chat format of a model, and the one place where it is chosen.

    tokenizer, its chat template, [agent] --choose_format--> ChatFormat --renderer--> tokens of every session

Training, evaluation, serving, recording and the agent all use the format chosen here, so that a model reads
in use what it read in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from etude.config import GrammarName, TemplateName
from etude.errors import ConfigError
from etude.tokens.chat.renderer_cache import RendererCache
from etude.tokens.chat_template import write_chat_template
from etude.tokens.derived import derive_template
from etude.tokens.grammar import Grammar, HermesGrammar, ToolSchema, XmlGrammar
from etude.tokens.grammar.native import ANNOUNCED_GRAMMARS
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
    **ANNOUNCED_GRAMMARS,
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The chat format of one model: tokenizer, template, grammar, tool schemas (not their code).

    Earlier reasoning stays as it was sampled: no session renders it again.
    """

    tokenizer: Tokenizer
    """With the chat template by which other programs render the same tokens, if there is one."""
    template: Template
    grammar: str
    """`hermes`, `xml`, or a grammar whose tools the model's own chat template announces."""
    tools: tuple[ToolSchema, ...] = ()
    """Tools of the agent."""
    system: str | None = None
    """Text of a system message that also announces the tools. None: there is none, as for models trained
    with these tools from scratch."""

    @property
    def is_own(self) -> bool:
        """Whether it is Étude's own format, in which every mark is one token."""
        return self.template is ETUDE_TEMPLATE and self.grammar == "xml"

    @property
    def digest(self) -> str:
        """BLAKE3 hex digest: formats with equal digests render equal tokens."""
        described = (self.tokenizer.digest, self.template, self.grammar, self.tools, self.system)
        return digest_format(self.tokenizer, _GRAMMARS[self.grammar](()), *described)

    def renderer(self) -> Renderer:
        """The renderer of the agent's sessions. Raises ConfigError for tools that the grammar refuses, or if
        the tokenizer holds only some of their tags."""
        renderer = Renderer(self.tokenizer, _GRAMMARS[self.grammar](self.tools), self.template)
        if self.system is not None:
            renderer.system = renderer.describe(self.system, self.tools)
        return renderer

    def renderers(self) -> RendererCache:
        """Renderers for conversations whose tools the client defines."""
        return RendererCache(self.tokenizer, _GRAMMARS[self.grammar], self.template)


def choose_format(
    tokenizer: Tokenizer, template: TemplateName = "auto", grammar: GrammarName = "auto"
) -> ChatFormat:
    """The format of a tokenizer's model, without tools.

    `auto`: Étude's own template if the tokenizer has its control tokens; else one derived from the model's
    chat template; without that, ChatML if the tokenizer has its tokens. `model`: derived from the chat
    template. Calls are tags in Étude's template; in any other the form that the chat template writes, or if
    it announces no tools or writes calls in an unknown form, JSON as Hermes and Qwen write it.

    Raises ConfigError if none fits, for a chat template that no `Template` describes, or an unknown name.
    """
    for field, name, known in (("template", template, TemplateName), ("grammar", grammar, GrammarName)):
        if name not in get_args(known):
            raise ConfigError(
                "is not a valid choice", field=f"agent.{field}", received=name, fix=", ".join(get_args(known))
            )
    found, spoken, calls = _choose_template(tokenizer, template, grammar == "auto")
    if found is not ETUDE_TEMPLATE:
        # Other programs that load the exported checkpoint must end answers where sessions did.
        spoken = spoken.with_end_tokens([spoken.control_id(end.name) for end in found.ends])
        if not spoken.chat_template:
            spoken = spoken.with_chat_template(write_chat_template(found))
    if found is ETUDE_TEMPLATE and not tokenizer.has_control("<tool_call>"):
        calls = "xml"
    return ChatFormat(spoken, found, calls if grammar == "auto" else grammar)


def _choose_template(tokenizer: Tokenizer, name: str, in_any_form: bool) -> tuple[Template, Tokenizer, str]:
    """The template, the tokenizer with a matching chat template, and the grammar of calls: with `in_any_form`
    the one that the model's chat template writes, else that of Hermes."""
    if name == "auto":
        known = [ETUDE_TEMPLATE, *([] if tokenizer.chat_template else (QWEN3_TEMPLATE, CHATML_TEMPLATE))]
        fitting = next((template for template in known if not _missing(tokenizer, template)), None)
        name = fitting.name if fitting is not None else "model"
    if name == "model":
        if not tokenizer.chat_template:
            raise ConfigError(
                "the model has no chat template, and its control tokens fit none that is known",
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
    """The plain template. Raises ConfigError for a tokenizer that names no end token."""
    named = tokenizer.template_variables
    end = named.get("eos_token", "")
    if not tokenizer.has_control(end):
        raise ConfigError(
            "the tokenizer names no end-of-text token",
            field="tokenizer_config.json: eos_token",
            received=end,
            fix="set it in that file",
        )
    begin = named.get("bos_token", end)
    return plain_template(begin if tokenizer.has_control(begin) else end, end)


def _missing(tokenizer: Tokenizer, template: Template) -> list[str]:
    return [name for name in template.control_tokens if not tokenizer.has_control(name)]
