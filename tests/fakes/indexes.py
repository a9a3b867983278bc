"""Waits for indexes that are built in the background."""

from __future__ import annotations

import asyncio

from etude.agent.index.templates import TemplateIndexes
from etude.sandbox.template import Template


async def until_built(indexes: TemplateIndexes, template: Template) -> None:
    """Waits until the template's indexes are built. Raises the build's exception, if any."""
    await asyncio.shield(indexes._index(template)._building)
