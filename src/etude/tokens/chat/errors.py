"""What is refused of a conversation that a client tells, whatever the API that it speaks."""

from __future__ import annotations

from etude.errors import UserError


class BadRequestError(UserError):
    """A request that breaks its API's format, or asks for what is not done here."""


class ContextLengthError(UserError):
    """A history that leaves no room for an answer. Units: tokens."""

    def __init__(self, num_tokens: int, max_tokens: int, field: str = "messages") -> None:
        super().__init__(
            "leaves no room for an answer in the model's context",
            field=field,
            received=num_tokens,
            fix=f"stay under {max_tokens} tokens",
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens

    @classmethod
    def check(cls, least_tokens: int, max_tokens: int, field: str = "messages") -> None:
        """Raises it for what is certain to be too long before it is encoded, which takes its time."""
        if least_tokens >= max_tokens:
            raise cls(least_tokens, max_tokens, field)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles whole."""
        return type(self), (self.num_tokens, self.max_tokens, self.field)
