"""A cache of renderers, by the tools that a conversation offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from etude.errors import ConfigError
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.messages import Opening
from etude.tokens.grammar import Grammar, Parameter, ToolSchema
from etude.tokens.renderer import Renderer, digest_format
from etude.tokens.template import Template
from etude.tokens.tokenizer import Tokenizer

_MAX_RENDERERS = 256


class RendererCache:
    """One renderer for each set of tools; the least recently used are evicted."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        make_grammar: Callable[[Sequence[ToolSchema]], Grammar],
        template: Template,
    ) -> None:
        self.tokenizer = tokenizer
        self._make_grammar = make_grammar
        self._template = template
        self._renderer = lru_cache(_MAX_RENDERERS)(self._make_renderer)

    @property
    def digest(self) -> str:
        """Digest of tokenizer, grammar and template: tokens under another digest have another meaning."""
        grammar = self._make_grammar(())
        described = (self.tokenizer.digest, grammar.name, self._template)
        return digest_format(self.tokenizer, grammar, *described)

    def find(self, opening: Opening) -> Renderer:
        """The renderer for an opening's tools, without tools for which the model lacks control tokens.

        Raises BadRequestError for tools that the grammar refuses.
        """
        try:
            return self._renderer(opening.tools)
        except ConfigError as error:
            raise BadRequestError(
                error.message, field="tools", received=error.received, fix=error.fix
            ) from error

    def _make_renderer(self, tools: tuple[ToolSchema, ...]) -> Renderer:
        return Renderer(self.tokenizer, self._make_grammar(self._callable(tools)), self._template)

    def _callable(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        """The tools and parameters whose tags the tokenizer holds, if it holds any tag; else all, in text
        mode. Also all if none would be left: the renderer then says why it refuses them."""
        tags = self._make_grammar(tools).control_tokens()
        if not any(map(self.tokenizer.has_control, tags)):
            return tools
        return [kept for tool in tools if (kept := self._restricted(tool)) is not None] or tools

    def _restricted(self, tool: ToolSchema) -> ToolSchema | None:
        """The tool without optional parameters that the model has no tags for; None if it cannot call the
        tool at all."""

        def is_held(*parameters: Parameter) -> bool:
            grammar = self._make_grammar((replace(tool, parameters=parameters),))
            return all(map(self.tokenizer.has_control, grammar.control_tokens()))

        kept = tuple(parameter for parameter in tool.parameters if is_held(parameter))
        lacks = any(parameter.required and parameter not in kept for parameter in tool.parameters)
        return None if lacks or not is_held(*kept) else replace(tool, parameters=kept)
