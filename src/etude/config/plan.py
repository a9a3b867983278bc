"""Assumptions of `etude plan` about the machine and about sessions."""

from __future__ import annotations

from pydantic import Field

from etude.config.base import Section


class PlanConfig(Section):
    """Assumptions behind a plan. A value of 0 is measured on this machine if possible."""

    enforce: bool = True
    """Whether `etude train` refuses to start if the RL stage does not fit into the free memory of this
    machine. `device_memory_gb` does not enter this check."""
    device_memory_gb: float = Field(default=0.0, ge=0)
    """Memory of one device in 10^9 bytes. 0: that of this machine's GPU if the run computes on one, otherwise
    that of the machine."""
    peak_tflops: float = Field(default=0.0, ge=0)
    """Peak rate of matrix products of one device in the run's number format, in TFLOP/s. 0: measured here in
    half a second."""
    bandwidth_gb_per_s: float = Field(default=0.0, ge=0)
    """Memory bandwidth of one device in GB/s; 0: measured here."""
    network_gb_per_s: float = Field(default=1.0, gt=0)
    """Rate at which weights reach engines on other machines, in GB/s."""
    link_gb_per_s: float = Field(default=0.1, gt=0)
    """Rate of the link between clusters, in GB/s."""
    codec_gb_per_s: float = Field(default=1.0, gt=0)
    """Rate at which one thread encodes or decodes a weight update for a store, in GB/s."""
    update_ratio: float = Field(default=0.0, ge=0)
    """Size of the weights over the size of such an update. 0: 20 with `weights.dtype = "bfloat16"`, otherwise
    1.5."""
    training_share: float = Field(default=0.4, gt=0, le=1)
    """Share of the peak rate that training reaches."""
    prefill_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the peak rate that prompts and observations reach."""
    decode_share: float = Field(default=0.6, gt=0, le=1)
    """Share of the memory bandwidth that decoding reaches."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of one device per hour, in every cluster. If all processes share one machine: the price of that
    machine."""
    borrowed_price_per_hour: float = Field(default=0.0, ge=0)
    """Price of one borrowed replica per hour while it is lent."""
    worker_price_per_hour: float = Field(default=0.0, ge=0)
    """Price of the resources of one rollout worker per hour, sandboxes included."""
    cluster_engines: int = Field(default=1, ge=1)
    """Number of engines that request sessions from the run, with `clusters.listen`: one for each `etude
    sample`."""
    vocab_size: int = Field(default=0, ge=0)
    """Vocabulary of the model described by `model`, if there is no checkpoint; 0: `tokenizer.vocab_size`."""
    prompt_tokens: int = Field(default=60, ge=1)
    """Tokens of a session's first prompt."""
    turns: float = Field(default=6.0, gt=0)
    """Messages of the agent in one session."""
    sampled_tokens: float = Field(default=120.0, gt=0)
    """Tokens that the model samples in one session."""
    observation_tokens: float = Field(default=250.0, ge=0)
    """Tokens of tool results in one session."""
    tool_s: float = Field(default=0.02, ge=0)
    """Wall time of one turn's tools in seconds."""
    tool_cpu_s: float = Field(default=0.0, ge=0)
    """Processor time of one turn's tools in seconds, if sandboxes share the machine with the rest."""
    turn_cpu_s: float = Field(default=0.0024, ge=0)
    """Processor time of one turn in the process that runs the agent (the run's own, or a worker's), in
    seconds."""
    useful_share: float = Field(default=0.8, gt=0, le=1)
    """Share of the sampled groups whose verdicts differ; the others are replaced."""

    @property
    def session_tokens(self) -> float:
        """Tokens of a whole session."""
        return self.prompt_tokens + self.sampled_tokens + self.observation_tokens
