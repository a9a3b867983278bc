"""How many processes train one model, and what they divide among them."""

from __future__ import annotations

from pydantic import Field, model_validator

from etude.config.base import Section


class ParallelConfig(Section):
    """The mesh of training processes: `ranks` = replicate x fsdp x expert x context x tensor.

    Ranks along `replicate`, `fsdp` and `expert` train on different sequences; those along `context` and
    `tensor` share them.
    """

    ranks: int = Field(default=1, ge=1)
    """Processes that train together; 1 needs none of the rest. Under `torchrun` it must be its number."""
    fsdp: int = Field(default=1, ge=1)
    """Parts that every weight, gradient and optimiser state is cut into (FSDP2)."""
    expert: int = Field(default=1, ge=1)
    """Parts that each layer's experts are divided into: tokens travel to their experts and back."""
    context: int = Field(default=1, ge=1)
    """Parts that long sequences are cut into."""
    tensor: int = Field(default=1, ge=1)
    """Parts that each layer's heads and inner widths, and the vocabulary, are divided into."""
    timeout_s: float = Field(default=120.0, gt=0)
    """How long a rank waits for another inside a step before the run ends with an error."""

    @property
    def replicate(self) -> int:
        """Copies of the whole arrangement: what the other sizes leave of `ranks`."""
        return self.ranks // (self.fsdp * self.expert * self.context * self.tensor)

    @model_validator(mode="after")
    def _fits_together(self) -> ParallelConfig:
        product = self.fsdp * self.expert * self.context * self.tensor
        if self.ranks % product:
            raise ValueError(
                f"ranks: must be a multiple of fsdp x expert x context x tensor = {self.fsdp} x "
                f"{self.expert} x {self.context} x {self.tensor} = {product}, received {self.ranks}"
            )
        return self
