"""Frames of messages, and the tools of which a tokenizer has the tags."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.environment.recording.recording_builders import qwen_tokenizer

from etude.tokens import QWEN3_TEMPLATE, Renderer
from etude.tokens.chat.client_tools import client_tool
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.framing import Framing
from etude.tokens.chat.messages import Opening, SystemWords, UserWords
from etude.tokens.chat.renderer_cache import RendererCache
from etude.tokens.grammar.hermes import HermesGrammar
from etude.tokens.grammar.xml import XmlGrammar


def test_systems_words_in_the_middle_have_the_users_frame_where_the_template_has_none_for_them() -> None:
    template = replace(QWEN3_TEMPLATE, system=(), only_answers_end=True)
    framing = Framing(Renderer(qwen_tokenizer(), HermesGrammar([]), template), Opening())
    system, user = (framing.render_given(kind("Be brief."), first=False) for kind in (SystemWords, UserWords))
    assert system.tolist() == user.tolist()


def test_tools_of_which_each_lacks_a_tag_are_refused_and_do_not_vanish() -> None:
    tools = tuple(
        client_tool(name, None, {"properties": {"path": {"type": "string"}}}, "tools")
        for name in ("read", "look")
    )
    tags = [XmlGrammar((tool,)).control_tokens() for tool in tools]
    shared = sorted(set(tags[0]) & set(tags[1]))
    tokenizer = qwen_tokenizer().with_control_tokens(shared)
    renderers = RendererCache(tokenizer, XmlGrammar, QWEN3_TEMPLATE)
    with pytest.raises(BadRequestError, match="only some of the tools") as caught:
        renderers.find(Opening("", tools))
    assert caught.value.field == "tools"
    whole = RendererCache(tokenizer.with_control_tokens(tags[0]), XmlGrammar, QWEN3_TEMPLATE)
    assert [tool.name for tool in whole.find(Opening("", tools)).grammar.tools] == ["read"]
