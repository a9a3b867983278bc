"""The inference engine of a run."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import Section

_PARALLEL = {
    "--tensor-parallel-size": "tp",
    "-tp": "tp",
    "--pipeline-parallel-size": "pp",
    "-pp": "pp",
    "--data-parallel-size": "dp",
    "-dp": "dp",
    "--prefill-context-parallel-size": "pcp",
    "-pcp": "pcp",
}
"""vLLM's arguments that multiply to the number of GPUs of a server, with their short names."""


class VllmConfig(Section):
    """Settings of vLLM, if `engine.backend` is `vllm`. See docs/vllm.md."""

    python: str = ""
    """Python interpreter of the environment in which vLLM is installed. A server is started there, and ends
    with the run."""
    url: str = ""
    """Address of a server that is already running, instead of `python`. docs/vllm.md names the arguments that
    it needs."""
    key_file: str = ""
    """File with the server's `--api-key`, if it has one."""
    arguments: tuple[str, ...] = ()
    """Additional arguments of the server that is started, such as `--tensor-parallel-size 8`, one word per
    entry."""
    environment: tuple[str, ...] = ()
    """Additional environment variables of the server, each as `NAME=value`."""
    record_routes: bool = True
    """Whether the experts of every position are recorded, in a mixture of experts."""
    probe_tolerance: float = Field(default=0.0, ge=0)
    """Mean difference in log-probability from a freshly loaded model that is allowed after an update. 0: set
    by the number format (0.001 for float32, 0.05 for bfloat16)."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that the server may take to become ready."""

    @model_validator(mode="after")
    def _fits_together(self) -> VllmConfig:
        if self.python and self.url:
            raise ValueError(f"url: must be empty with python, which starts a server, received {self.url!r}")
        for setting in self.environment:
            if "=" not in setting:
                raise ValueError(f"environment: must be NAME=value, received {setting!r}")
        sizes = self._parallel_sizes()
        for name, size in sizes.items():
            if not size.isdigit() or not int(size):
                raise ValueError(f"arguments: {name} must be 1 or more, received {size!r}")
        if int(sizes.get("dp", "1")) > 1:
            raise ValueError(
                "arguments: a server must be a single replica; leave out "
                "--data-parallel-size and set cluster.engines to the number of replicas, received "
                f"{sizes['dp']!r}"
            )
        return self

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of a server that is started here."""
        return 0 if self.url else math.prod(int(size) for size in self._parallel_sizes().values())

    def _parallel_sizes(self) -> dict[str, str]:
        """Values of the arguments in _PARALLEL. As in vLLM, the last one counts if repeated."""
        sizes: dict[str, str] = {}
        for place, word in enumerate(self.arguments):
            name, equals, value = word.partition("=")
            kind = _PARALLEL.get(name.replace("_", "-"))
            if kind is not None:
                sizes[kind] = value if equals else "".join(self.arguments[place + 1 : place + 2])
        return sizes


class EngineConfig(Section):
    """The inference engine."""

    backend: Literal["etude", "vllm"] = "etude"
    """`etude`: the engine in this process. `vllm`: vLLM, for large models on GPUs. vLLM computes requests as
    they arrive, so a run is not reproducible bit by bit, and of the fields below only `num_slots` applies."""
    vllm: VllmConfig = VllmConfig()
    """Settings of vLLM."""
    num_slots: int = Field(default=256, ge=1)
    """Number of sessions that are held at the same time."""
    cache_tokens: int = Field(default=0, ge=0)
    """Number of tokens whose keys and values are kept, for all sessions together. If they do not suffice, the
    session that was idle longest loses its own first; then the youngest request waits. 0: enough for all
    sessions at their longest."""
    prefill_tokens: int = Field(default=2048, ge=16)
    """Largest number of prompt and observation tokens that are computed in one step."""
    cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of keys and values. `auto`: the model's. `bfloat16` holds twice as many as float32, and
    moves the engine's log-probabilities away from the trainer's: by 0.002 on average in small random models,
    by 0.01 at most. Not with native kernels."""
    weight_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format in which native kernels keep their copy of the matrices; they compute in float32 in any
    case. `auto`: the model's. `bfloat16` halves the time to read them, which dominates if few sessions decode
    with a large model, and moves log-probabilities away from the trainer's as much as rounded weights do. On
    a GPU set `dtype` instead."""
    speculative_tokens: int = Field(default=0, ge=0, le=64)
    """Largest number of tokens that are drafted ahead and verified in one step; 0 turns drafting off. The
    sampled tokens are the same either way. Sessions in which drafting does not pay continue without it."""
    drafts: Literal["ngram", "mtp"] = "ngram"
    """Source of drafts. `ngram`: what followed the same tokens earlier in the session. `mtp`: layers for
    multi-token prediction, which `initial_checkpoint` must have."""
    kernels: Literal["auto", "eager", "native", "gpu"] = "auto"
    """What computes a step. `eager`: the trainer's module, operator by operator. `native`: one call of
    compiled code, several times faster for small models; needs a C compiler (`CC`, cc, gcc or clang; the
    library is kept under `XDG_CACHE_HOME` or ~/.cache). `gpu`: the module on a GPU, with Triton kernels and
    captured decoding steps. `auto`: `gpu` on a GPU, otherwise `native` if it compiles. The choice is stored
    with the run in `environment.json`; a resumed run needs the same one, or must name another."""
    native_threads: int = Field(default=0, ge=0)
    """Largest number of threads of a native step with many rows; 0: all cores. They sleep between steps, and
    their number changes no bit of the result."""
    num_threads: int = Field(default=1, ge=0)
    """Number of compute threads while sampling, when sandboxes need the other cores. 0: as many as in
    training."""
    tool_delay_steps: int = Field(default=4, ge=0)
    """Fixed delay of tool results in engine steps. A session returns with its results at the next multiple of
    this that is at least this many steps away, so the schedule, and with it the run, is reproducible however
    long the tools take."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of one replica, if it computes on GPUs."""
        return self.vllm.num_gpus if self.backend == "vllm" else 1

    @model_validator(mode="after")
    def _settings_agree(self) -> EngineConfig:
        if self.drafts == "mtp" and not self.speculative_tokens:
            raise ValueError("speculative_tokens: must be 1 or more with drafts = 'mtp', received 0")
        if self.cache_dtype == "bfloat16" and self.kernels == "native":
            raise ValueError(
                "cache_dtype: native kernels hold keys and values in float32, received 'bfloat16'"
            )
        return self
