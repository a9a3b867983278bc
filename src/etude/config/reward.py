"""What a trajectory earns: the verdict of its hidden tests, less what it left undone or spent."""

from __future__ import annotations

from pydantic import Field, field_validator

from etude.config.base import Section


class LengthConfig(Section):
    """A concave price of length: the first steps cost more than the hundredth, so that hard tasks may take
    long.

    x is the weighted sum below, in thousands; the price is weight * ((1 + k x)^(1 - q) - 1) / (k (1 - q)),
    and weight * log(1 + k x) / k where q is 1.
    """

    weight: float = Field(default=0.0, ge=0)
    """Price of the first thousand, nearly; 0: length is free."""
    k: float = Field(default=1.0, gt=0)
    """How soon the price bends, per thousand."""
    q: float = Field(default=1.0, ge=0)
    """How much it bends; 0: a straight line."""
    thinking_token: float = Field(default=1.0, ge=0)
    """Of one token of reasoning."""
    call_token: float = Field(default=1.0, ge=0)
    """Of one token of a tool call."""
    message_token: float = Field(default=1.0, ge=0)
    """Of one token of words to the user."""
    output_token: float = Field(default=0.1, ge=0)
    """Of one token that a tool, or the user, answered with."""
    call: float = Field(default=20.0, ge=0)
    """Of one tool call beside its tokens."""
    parallel_share: float = Field(default=0.25, ge=0, le=1)
    """What a call costs that is made beside another in the same turn, as a share of `call`."""
    turn: float = Field(default=50.0, ge=0)
    """Of one turn."""


class RewardConfig(Section):
    """What a trajectory earns. Penalties are taken off; all but `partial_weight` count only in groups whose
    verdicts differ, but for malformed calls, which teach where a whole group failed."""

    partial_weight: float = Field(default=0.0, ge=0, lt=1)
    """The verdict of a session that fails: this times the share of hidden tests that pass. 0: all or
    nothing."""
    malformed_penalty: float = Field(default=0.05, ge=0)
    """Taken off for each malformed call."""
    malformed_at_most: int = Field(default=4, ge=0)
    """Malformed calls that are penalised per trajectory."""
    limit_penalty: float = Field(default=0.1, ge=0)
    """Taken off for running into a limit instead of finishing."""
    invalid_arguments_penalty: float = Field(default=0.0, ge=0)
    """Taken off for each call of an unknown tool or with impossible arguments."""
    timeout_penalty: float = Field(default=0.0, ge=0)
    """Taken off for each command of the agent's that ran longer than it may."""
    unexpected_environment_penalty: float = Field(default=0.0, ge=0)
    """Taken off for each call that supposes what is not so: no such file, no unique match."""
    tool_errors_at_most: int = Field(default=4, ge=0)
    """Tool errors of one class that are penalised per trajectory."""
    todo_penalty: float = Field(default=0.0, ge=0)
    """Taken off for each to-do that is left open."""
    todos_at_most: int = Field(default=4, ge=0)
    """Open to-dos that are penalised per trajectory."""
    lint_penalty: float = Field(default=0.0, ge=0)
    """Taken off for each finding of ruff's in changed Python files that was not there before."""
    lints_at_most: int = Field(default=4, ge=0)
    """New findings that are penalised per trajectory."""
    style_penalty: float = Field(default=0.0, ge=0)
    """Taken off for each added line in another style than its file's: trailing spaces, tabs among spaces (or
    spaces among tabs), or longer than `style_columns` where no line of the file was."""
    style_columns: int = Field(default=100, ge=20)
    """Characters of a line that are enough."""
    styles_at_most: int = Field(default=4, ge=0)
    """Lines in another style that are penalised per trajectory."""
    length: LengthConfig = LengthConfig()
    """Length."""
    custom: dict[str, float] = Field(default_factory=dict)
    """Terms of your own: `"package.module:function" = weight`. The function takes an
    `etude.environment.rewards.Evidence` and returns a finite number."""

    @property
    def reviews_changes(self) -> bool:
        """Whether the agent's changes are looked at beside being tested."""
        return self.lint_penalty > 0 or self.style_penalty > 0

    @field_validator("custom")
    @classmethod
    def _custom_are_names(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            module, colon, function = name.partition(":")
            if not (colon and module and function.isidentifier()):
                raise ValueError(f"must be named package.module:function, received {name!r}")
        return value
