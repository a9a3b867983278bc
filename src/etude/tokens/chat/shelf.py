"""Renderers by the tools that a conversation offers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from blake3 import blake3

from etude.errors import ConfigError
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.messages import Opening, canonical
from etude.tokens.grammar.interface import Grammar, ToolSchema
from etude.tokens.renderer import Renderer, announcing_template
from etude.tokens.template import Template
from etude.tokens.tokenizer import Tokenizer

_MAX_RENDERERS = 256


class RendererShelf:
    """One renderer for each set of tools; the least used go first."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        make_grammar: Callable[[Sequence[ToolSchema]], Grammar],
        template: Template,
    ) -> None:
        self.tokenizer = tokenizer
        self._make_grammar = make_grammar
        self._template = template
        self._renderers: OrderedDict[str, Renderer] = OrderedDict()

    @property
    def digest(self) -> str:
        """Names tokenizer, grammar and template: tokens of another digest mean something else."""
        grammar = self._make_grammar(())
        native = announcing_template(self.tokenizer, grammar)
        described = (self.tokenizer.digest, grammar.name, self._template, *native)
        return blake3(repr(described).encode()).hexdigest()

    def find(self, opening: Opening) -> Renderer:
        """The renderer for an opening's tools, without those that a model with tags of its own cannot call.

        Raises BadRequestError for tools that the grammar refuses.
        """
        key = canonical([tool.raw for tool in opening.tools])
        renderer = self._renderers.get(key)
        if renderer is None:
            try:
                tools = self._callable(opening.tools)
                renderer = Renderer(self.tokenizer, self._make_grammar(tools), self._template)
            except ConfigError as error:
                raise BadRequestError(
                    error.message, field="tools", received=error.received, fix=error.fix
                ) from error
            if len(self._renderers) >= _MAX_RENDERERS:
                self._renderers.popitem(last=False)
            self._renderers[key] = renderer
        self._renderers.move_to_end(key)
        return renderer

    def _callable(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        """The tools of which the tokenizer has all tags, if it has a tag of any; else all, in text mode. All,
        too, where none would be left: the renderer says why it refuses them."""
        tags = [self._make_grammar((tool,)).control_tokens() for tool in tools]
        has = self.tokenizer.has_control
        if not any(has(tag) for names in tags for tag in names):
            return tools
        return [tool for tool, names in zip(tools, tags, strict=True) if all(map(has, names))] or tools
