"""The fake server's engine: a small model of ours that samples one token of every request per step."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from etude.model import PackedAttention
from etude.model.loading import AnyModel, load_any_model

Fault = Literal[
    "load_fails", "loads_nothing", "loads_half", "abort_midway", "dies_when_sampling", "abort_overtakes"
]
_STEP_S = 0.002
_FLOOR = -9999.0


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    name: str
    prompt: list[int]
    params: dict[str, Any]
    generator: torch.Generator
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue[dict[str, Any]])
    sampled: list[int] = field(default_factory=list[int])
    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    labels: list[str] = field(default_factory=list[str])
    prompt_logprobs: list[Any] | None = None
    finish: str | None = None
    salt: str = ""
    """Only requests with equal salts share cached keys."""
    num_cached: int = 0
    """Prompt tokens whose keys are cached already."""


class FakeEngine:
    """Recomputes every whole sequence at each step: slow, but evidently correct."""

    def __init__(self, directory: Path) -> None:
        self.model: AnyModel = load_any_model(directory)
        self.label = "default"
        self.faults: set[Fault] = set()
        """Active faults."""
        self.jobs: dict[str, Job] = {}
        self.was_aborted = asyncio.Event()
        """Set by the first abort of any request."""
        self.resets = 0
        self.pauses = 0
        self.loads: list[str] = []
        self._go = asyncio.Event()
        self._go.set()
        self._computed: dict[str, list[list[int]]] = {}
        """Salt -> token sequences whose keys are cached."""
        self._routes: dict[str, dict[str, Any]] = {}
        self._progress: dict[str, int] = {}

    async def run(self) -> None:
        """Steps until it is cancelled."""
        while True:
            await self._go.wait()
            for job in list(self.jobs.values()):
                self._step(job)
            await asyncio.sleep(_STEP_S)

    def submit(self, document: dict[str, Any]) -> Job:
        """Adds a request, given the body of `/inference/v1/generate`."""
        params = document["sampling_params"]
        generator = torch.Generator().manual_seed(int(params.get("seed", 0)) % 2**63)
        job = Job(document["request_id"], list(document["token_ids"]), params, generator)
        job.salt = document["cache_salt"]
        known = self._computed.get(job.salt, [])
        job.num_cached = max((_num_common(job.prompt[:-1], tokens) for tokens in known), default=0)
        self.jobs[job.name] = job
        return job

    def abort(self, name: str) -> None:
        """Ends a request; unknown ones are ignored."""
        self.was_aborted.set()
        job = self.jobs.get(name)
        if job is not None:
            self._finish(job, "abort")
            job.events.put_nowait({"token_ids": [], "entries": []})

    def pause(self) -> None:
        """Stops stepping until `resume`."""
        self.pauses += 1
        self._go.clear()

    def resume(self) -> None:
        """Continues stepping."""
        self._go.set()

    def call(self, method: str, arguments: list[str]) -> dict[str, Any]:
        """Calls a method of the worker extension."""
        if method == "etude_prepare":
            return self._prepare(arguments[0] == "yes")
        if method == "etude_load":
            progress = {name: self._progress[name] for name in arguments[1:] if name in self._progress}
            return self._load(Path(arguments[0])) | {"progress": progress, "load_s": 0.0}
        if method == "etude_gap":
            return {"gap_s": 0.0, "step_s": 0.0}
        if method == "etude_take_routes":
            return {name: self._routes.pop(name) for name in arguments if name in self._routes}
        return {"error": f"no such method: {method}"}

    def _prepare(self, capture: bool) -> dict[str, Any]:
        model = self.model
        routed = model.num_experts > 0
        return {
            "device": "cpu",
            "expert_layers": model.routes_shape[0],
            "captures": capture and routed,
            "adapts": False,
            "dtype": "float32",
            "max_tokens": model.max_positions,
            "vocab_size": model.vocab_size,
        }

    def _load(self, directory: Path) -> dict[str, Any]:
        if "load_fails" in self.faults:
            return {"error": "RuntimeError: out of memory"}
        self.loads.append(str(directory))
        before = {name: parameter.clone() for name, parameter in self.model.named_parameters()}
        if "loads_half" in self.faults:
            new = dict(load_any_model(directory).named_parameters())
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if "experts" not in name:
                        parameter.copy_(new[name])
        elif "loads_nothing" not in self.faults:
            self.model = load_any_model(directory)
        after = self.model.named_parameters()
        changed = any(not torch.equal(parameter, before[name]) for name, parameter in after)
        return {"loaded": str(directory), "changed": changed}

    @torch.no_grad()
    def _step(self, job: Job) -> None:
        if "dies_when_sampling" in self.faults:
            raise RuntimeError("the engine died on purpose")
        ids = torch.tensor([*job.prompt, *job.sampled])
        recorder = self.model.recorder()
        hidden = self.model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]), recorder)
        logits = self.model.logits(hidden)
        self._keep_routes(job, recorder.pop_routes(len(ids)).numpy())
        if "prompt_logprobs" in job.params and job.prompt_logprobs is None:
            scores = logits.log_softmax(-1)
            rows = [float(scores[place - 1, token]) for place, token in enumerate(job.prompt) if place]
            named = zip(job.prompt[1:], rows, strict=True)
            job.prompt_logprobs = [None, *({str(token): {"logprob": value}} for token, value in named)]
        self._sample(job, logits[-1])

    def _sample(self, job: Job, logits: torch.Tensor) -> None:
        params = job.params
        temperature = float(params.get("temperature", 1.0))
        scores = (logits / (temperature or 1.0)).log_softmax(-1)
        noise = torch.rand(scores.shape, generator=job.generator)
        token = int((scores if temperature == 0 else scores - (-noise.log()).log()).argmax())
        order = scores.argsort(descending=True).tolist()
        wanted = [token, *order[: int(params.get("logprobs") or 0)]]
        top = [
            {
                "token_id": found,
                "logprob": max(float(scores[found]), _FLOOR),
                "rank": order.index(found) + 1,
            }
            for found in dict.fromkeys(wanted)
        ]
        entry = {**top[0], "top_logprobs": top}
        job.sampled.append(token)
        job.entries.append(entry)
        job.labels.append(self.label)
        self._progress[job.name] = len(job.prompt) + len(job.sampled) - 1
        if token in params.get("stop_token_ids", ()):
            self._finish(job, "stop")
        elif len(job.sampled) >= int(params.get("max_tokens", 16)):
            self._finish(job, "length")
        elif "abort_midway" in self.faults and len(job.sampled) == 3:
            self._finish(job, "abort")
        job.events.put_nowait({"token_ids": [token], "entries": [entry]})

    def _finish(self, job: Job, reason: str) -> None:
        job.finish = reason
        self._computed.setdefault(job.salt, []).append([*job.prompt, *job.sampled[:-1]])
        self.jobs.pop(job.name, None)

    def _keep_routes(self, job: Job, routes: np.ndarray) -> None:
        if routes.shape[1]:
            data = base64.b64encode(routes.tobytes()).decode()
            shape, dtype = list(routes.shape), str(routes.dtype)
            self._routes[job.name] = {"start": 0, "shape": shape, "dtype": dtype, "data": data}


def _num_common(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
