"""The mesh of processes that train one model."""

from __future__ import annotations

from pydantic import Field, model_validator

from etude.config.base import Section


class ParallelConfig(Section):
    """The mesh of training processes: `ranks` = replicate x fsdp x expert x context x tensor.

    Ranks along `replicate`, `fsdp` and `expert` train on different sequences; those along `context` and
    `tensor` share them.
    """

    ranks: int = Field(default=1, ge=1)
    """Number of processes that train together; with 1 the fields below have no effect. Under `torchrun` it
    must be the same number."""
    fsdp: int = Field(default=1, ge=1)
    """Number of parts into which every weight, gradient and optimiser state is split (FSDP2)."""
    expert: int = Field(default=1, ge=1)
    """Number of parts into which each layer's experts are divided. Tokens are sent to their experts and
    back."""
    context: int = Field(default=1, ge=1)
    """Number of parts into which long sequences are split."""
    tensor: int = Field(default=1, ge=1)
    """Number of parts into which each layer's heads and inner widths, and the vocabulary, are divided."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that a rank waits for another within a step before the run ends with an error."""

    @property
    def replicate(self) -> int:
        """Number of replicas of the mesh: `ranks` divided by the other sizes."""
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
