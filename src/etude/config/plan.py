"""What `etude plan` supposes: the machine, and the sessions that it has not seen yet."""

from __future__ import annotations

from pydantic import Field

from etude.config.base import Section


class PlanConfig(Section):
    """Suppositions behind a plan. What is 0 is measured on this machine, as far as it can be."""

    enforce: bool = True
    """`etude train` counts the memory of its RL stage before it makes a directory, against what is free on
    this machine (not against the suppositions below), and ends where it does not suffice. Off: it begins all
    the same."""
    device_memory_gb: float = Field(default=0.0, ge=0)
    """Memory of one device, in 10^9 bytes; 0: of this machine's GPU where the run computes on one, else of
    the machine."""
    peak_tflops: float = Field(default=0.0, ge=0)
    """Matrix products of one device at the run's number format; 0: measured here, in half a second."""
    bandwidth_gb_per_s: float = Field(default=0.0, ge=0)
    """Memory bandwidth of one device; 0: measured here."""
    network_gb_per_s: float = Field(default=1.0, gt=0)
    """At which weights reach the engines, where those are on other machines."""
    link_gb_per_s: float = Field(default=0.1, gt=0)
    """Between clusters."""
    codec_gb_per_s: float = Field(default=1.0, gt=0)
    """At which one thread turns weights into an update for a store, or back."""
    update_ratio: float = Field(default=0.0, ge=0)
    """Times that such an update is smaller than the weights; 0: 20 with `weights.dtype = "bfloat16"`, else
    1.5."""
    training_share: float = Field(default=0.4, gt=0, le=1)
    """Of the peak, in training."""
    prefill_share: float = Field(default=0.5, gt=0, le=1)
    """Of the peak, over prompts and observations."""
    decode_share: float = Field(default=0.6, gt=0, le=1)
    """Of the bandwidth, in decoding."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Of one device, those of other clusters too; where all processes share one machine, of that."""
    borrowed_price_per_hour: float = Field(default=0.0, ge=0)
    """Of one borrowed replica, while it is lent."""
    worker_price_per_hour: float = Field(default=0.0, ge=0)
    """Of what one rollout worker takes, sandboxes included."""
    cluster_engines: int = Field(default=1, ge=1)
    """Engines that ask the run for sessions, with `clusters.listen`: one for each `etude sample`."""
    vocab_size: int = Field(default=0, ge=0)
    """Of a model that `model` describes, with no checkpoint at hand; 0: `tokenizer.vocab_size`."""
    prompt_tokens: int = Field(default=60, ge=1)
    """Of a session's first prompt."""
    turns: float = Field(default=6.0, gt=0)
    """Messages of the agent in one session."""
    sampled_tokens: float = Field(default=120.0, gt=0)
    """Of one session."""
    observation_tokens: float = Field(default=250.0, ge=0)
    """Tool results of one session."""
    tool_s: float = Field(default=0.02, ge=0)
    """Wall time of one turn's tools."""
    tool_cpu_s: float = Field(default=0.0, ge=0)
    """Processor time of the same, where sandboxes share the machine with the rest."""
    turn_cpu_s: float = Field(default=0.0024, ge=0)
    """Processor time that one turn takes of the process in which the agent is: its own, a worker's."""
    useful_share: float = Field(default=0.8, gt=0, le=1)
    """Of the groups that are sampled, those whose verdicts differ; others are replaced."""

    @property
    def session_tokens(self) -> float:
        """Of a whole session."""
        return self.prompt_tokens + self.sampled_tokens + self.observation_tokens
