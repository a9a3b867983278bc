"""The reward of a trajectory: the verdict of its hidden tests, minus penalties."""

from __future__ import annotations

from pydantic import Field, field_validator

from etude.config.base import Section


class LengthConfig(Section):
    """A concave price of length: the first steps cost more than the hundredth, so that hard tasks may take
    long.

    The price is weight * ((1 + k x)^(1 - q) - 1) / (k (1 - q)), and weight * log(1 + k x) / k if q is 1,
    where x is the weighted sum of the fields below in thousands.
    """

    weight: float = Field(default=0.0, ge=0)
    """Approximate price of the first thousand; 0: length is free."""
    k: float = Field(default=1.0, gt=0)
    """How soon the price flattens, per thousand."""
    q: float = Field(default=1.0, ge=0)
    """How much the price flattens; 0: not at all."""
    thinking_token: float = Field(default=1.0, ge=0)
    """Weight of one token of reasoning."""
    call_token: float = Field(default=1.0, ge=0)
    """Weight of one token of a tool call."""
    message_token: float = Field(default=1.0, ge=0)
    """Weight of one token of text for the user."""
    output_token: float = Field(default=0.1, ge=0)
    """Weight of one token of a tool result or of the user."""
    call: float = Field(default=20.0, ge=0)
    """Weight of one tool call in addition to its tokens."""
    parallel_share: float = Field(default=0.25, ge=0, le=1)
    """Weight of each further call in the same turn, as a share of `call`."""
    turn: float = Field(default=50.0, ge=0)
    """Weight of one turn."""


class PriceConfig(Section):
    """Adaptation of the weight of the price of solved sessions: it starts at 1, and is halved if fewer tasks
    of the split `validation` are solved at a lower price. Applies if rollouts and training alternate
    (`rl.max_staleness = 0`) and the family has that split; otherwise the weight stays 1."""

    validate_every: int = Field(default=20, ge=0)
    """RL steps between validations, whose tasks are played greedily; 0: none."""
    validation_tasks: int = Field(default=100, ge=1)
    """Number of tasks of each validation, always the same ones."""
    max_fall: float = Field(default=0.01, ge=0, lt=1)
    """Largest decrease in solved tasks, as a share, that does not halve the weight while the price falls."""


class RewardConfig(Section):
    """The reward of a trajectory. Penalties are subtracted from it. They apply among solved sessions only, so
    that giving up never pays; in a failed session, malformed calls penalise their own tokens. See
    docs/algorithms.md."""

    partial_weight: float = Field(default=0.0, ge=0, lt=1)
    """Reward of a failed session: this times the share of hidden tests that pass. 0: all or nothing."""
    malformed_penalty: float = Field(default=0.05, ge=0)
    """Penalty for each malformed call."""
    malformed_at_most: int = Field(default=4, ge=0)
    """Largest number of malformed calls that are penalised per trajectory."""
    limit_penalty: float = Field(default=0.1, ge=0)
    """Penalty for reaching a limit instead of finishing."""
    invalid_arguments_penalty: float = Field(default=0.0, ge=0)
    """Penalty for each call of an unknown tool or with invalid arguments."""
    timeout_penalty: float = Field(default=0.0, ge=0)
    """Penalty for each of the agent's commands that exceeds its time limit."""
    unexpected_environment_penalty: float = Field(default=0.0, ge=0)
    """Penalty for each call with a wrong assumption about the workspace, such as a missing file or an
    ambiguous match."""
    tool_errors_at_most: int = Field(default=4, ge=0)
    """Largest number of tool errors of one class that are penalised per trajectory."""
    todo_penalty: float = Field(default=0.0, ge=0)
    """Penalty for each to-do item that is left open."""
    todos_at_most: int = Field(default=4, ge=0)
    """Largest number of open to-do items that are penalised per trajectory."""
    lint_penalty: float = Field(default=0.0, ge=0)
    """Penalty for each new finding of ruff in changed Python files."""
    lints_at_most: int = Field(default=4, ge=0)
    """Largest number of new findings that are penalised per trajectory."""
    style_penalty: float = Field(default=0.0, ge=0)
    """Penalty for each added line whose style differs from its file: trailing spaces, tabs among spaces (or
    the reverse), or a line longer than `style_columns` in a file that had none."""
    style_columns: int = Field(default=100, ge=20)
    """Longest line in characters."""
    styles_at_most: int = Field(default=4, ge=0)
    """Largest number of such lines that are penalised per trajectory."""
    length: LengthConfig = LengthConfig()
    """Length."""
    price: PriceConfig = PriceConfig()
    """Adaptation of the weight of the price of solved sessions."""
    custom: dict[str, float] = Field(default_factory=dict)
    """Your own terms: `"package.module:function" = weight`. The function takes an
    `etude.environment.rewards.Evidence` and returns a finite number."""

    @property
    def most_price(self) -> float:
        """Upper bound of a solved session's price: half of the distance to the best failed session."""
        return (1.0 - self.partial_weight) / 2

    @property
    def reviews_changes(self) -> bool:
        """Whether the agent's changes are reviewed in addition to being tested."""
        return self.lint_penalty > 0 or self.style_penalty > 0

    @field_validator("custom")
    @classmethod
    def _custom_are_names(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            module, colon, function = name.partition(":")
            if not (colon and module and function.isidentifier()):
                raise ValueError(f"must be named package.module:function, received {name!r}")
        return value
