"""Errors for requests that are refused, common to all chat APIs."""

from __future__ import annotations

from etude.errors import UserError


class BadRequestError(UserError):
    """A request that breaks its API's format, or asks for an unsupported feature."""


class ContextLengthError(UserError):
    """A history that leaves no room for an answer. Units: tokens.

    Uses the message of OpenAI's API: agents recognise the error by it, and shorten the conversation.
    """

    def __init__(self, num_tokens: int, max_tokens: int, field: str = "messages") -> None:
        super().__init__(
            f"this model's maximum context length is {max_tokens} tokens, but your request resulted in "
            f"{num_tokens} tokens, which leaves no room for an answer",
            field=field,
            fix=f"reduce the length of the {field}",
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens

    @classmethod
    def check(cls, least_tokens: int, max_tokens: int, field: str = "messages") -> None:
        """Raises the error if a lower bound shows it already, before encoding, which is slow."""
        if least_tokens >= max_tokens:
            raise cls(least_tokens, max_tokens, field)

    def __reduce__(self) -> tuple[object, ...]:
        """Makes it picklable with all fields."""
        return type(self), (self.num_tokens, self.max_tokens, self.field)
