"""The supported chat APIs: each reads requests into one common form, and writes answers in its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from etude.serving.errors import ErrorAnswer
from etude.tokens.chat.answers import AnswerWriter
from etude.tokens.chat.anthropic_messages import MessagesWriter, anthropic_error, read_messages
from etude.tokens.chat.openai_chat import ChatWriter, read_chat
from etude.tokens.chat.openai_responses import ResponseWriter, read_response
from etude.tokens.chat.requests import ChatRequest


class Read(Protocol):
    """Reads the body of a request."""

    def __call__(self, body: Mapping[str, Any], agent: str = "", strict: bool = True) -> ChatRequest:
        """`agent`: the name that the client gave its agent; `strict`: unknown fields are refused.

        Raises BadRequestError.
        """
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API."""

    name: str
    """Name in metrics."""
    path: str
    read: Read
    writer: type[AnswerWriter]
    respell: Callable[[BaseException, ErrorAnswer], ErrorAnswer] = lambda error, answer: answer
    """Converts an error response from OpenAI's form to this API's."""


CHAT = Dialect("chat_completions", "/v1/chat/completions", read_chat, ChatWriter)
RESPONSES = Dialect("responses", "/v1/responses", read_response, ResponseWriter)
MESSAGES = Dialect("messages", "/v1/messages", read_messages, MessagesWriter, anthropic_error)
DIALECTS = (CHAT, RESPONSES, MESSAGES)


def respell_error(path: str, error: BaseException, answer: ErrorAnswer) -> ErrorAnswer:
    """Converts an error response from OpenAI's form to that of the API with the requested path."""
    base_path = path.removesuffix("/count_tokens")
    dialect = next((known for known in DIALECTS if base_path.endswith(known.path)), CHAT)
    return dialect.respell(error, answer)
