"""A system message that explains the tools, for models that were not trained with them."""

from __future__ import annotations

from collections.abc import Sequence

from etude.tokens.grammar import Grammar, ToolSchema
from etude.tokens.pieces import spell


def describe_tools(schemas: Sequence[ToolSchema], grammar: Grammar) -> str:
    """How to call the tools, in the words of `grammar`."""
    return spell(grammar.announce(schemas))
