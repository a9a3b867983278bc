"""Étude's extension of vLLM's workers: `--worker-extension-cls etude_vllm_worker.EtudeWorker`.

This file runs inside vLLM's own environment, so it imports vLLM, torch and the standard library, but not
Étude. Its methods are called by `/collective_rpc`; arguments are strings, results are dictionaries.

- `etude_load` loads a checkpoint directory's weights into the running model. It is one call to the engine,
  which executes it between two steps, so vLLM need not be paused around it. On a CPU vLLM's own reload
  reports success and computes nonsense, for two reasons, corrected here: expert weights are packed for
  their kernel only when the model is made, and copied unpacked afterwards; and an output head that is tied to
  the embedding keeps the packed copy of the old one. It also reports the progress of each request, which
  determines which tokens came from the old weights.
- On a CPU a seeded request whose prompt is computed in chunks, or recomputed, kills the engine: vLLM tries to
  rewind a generator, and a CPU's has no offset. `_wind_generators_back` rewinds it by its state.
- `etude_take_routes` returns the experts of every computed position, through the routers' capture hook.
  (`--enable-return-routed-experts` does it on GPUs, and needs Triton.)
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import base64
import hashlib
import itertools
import re
import statistics
import time
from collections import OrderedDict, deque
from functools import partial
from pathlib import Path
from typing import Any

import torch

_REQUEST = re.compile(r"etude-[0-9a-f]{32}")
_MAX_REQUESTS = 8192
"""Most requests with kept state; beyond that the oldest are dropped."""
_INTERVALS = 64
"""Number of step times to keep."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by size in bytes."""

if getattr(torch.cpu, "_is_amx_tile_supported", bool)():
    # Without it the first small bfloat16 product of the expert kernel dies with SIGILL.
    torch.cpu._init_amx()


class EtudeWorker:
    """Mixed into vLLM's worker: `self` is the worker, with its `model_runner`."""

    model_runner: Any
    _etude_digest: str = ""
    """Digest of the parameters after the last `etude_load`."""
    _etude_watch: _Watch | None = None
    _etude_routes: _Routes | None = None

    def etude_prepare(self, capture: str) -> dict[str, Any]:
        """Applies the corrections and begins to observe steps; with `capture` "yes" also records routes.
        Idempotent. Returns the abilities of this worker."""
        model = self.model_runner.get_model()
        layers = _expert_layers(model)
        if self._etude_watch is None:
            for layer in layers:
                _prepare_experts_again(layer)
            if self.model_runner.device.type == "cpu":
                _wind_generators_back(self.model_runner)
            self._etude_watch = _Watch(self.model_runner)
        if capture == "yes" and layers and self._etude_routes is None:
            self._etude_routes = _Routes(self.model_runner, layers)
            self._etude_watch.routes = self._etude_routes
        return {
            "device": str(self.model_runner.device),
            "expert_layers": len(layers),
            "captures": self._etude_routes is not None,
            "adapts": self.model_runner.lora_config is not None,
            "dtype": str(self.model_runner.model_config.dtype).removeprefix("torch."),
            "max_tokens": int(self.model_runner.model_config.max_model_len),
            "vocab_size": int(self.model_runner.model_config.get_vocab_size()),
        }

    def etude_load(self, directory: str, *requests: str) -> dict[str, Any]:
        """Loads the weights of a Hugging Face directory into the model, in place; if it has adapters, only
        these, since their base stays. `error`: what failed; the weights are then a mixture and must not be
        served. `progress`: computed positions of each of `requests` that has begun. `changed`: whether any
        parameter has changed. `load_s`: duration."""
        began = time.perf_counter()
        try:
            model = self.model_runner.get_model()
            before = self._etude_digest or _digest(model)
            if self.model_runner.lora_config is not None:
                self._exchange_adapters(directory)
            else:
                self.reload_weights(weights_path=directory)  # type: ignore[attr-defined]
                _pack_heads_again(model)
            self._etude_digest = _digest(model)
        except Exception as error:  # reported, because an HTTP 500 would hide it
            return {"error": f"{type(error).__name__}: {error}"}
        progress = {}
        if self._etude_watch is not None:
            self._etude_watch.note_exchange()
            progress = self._etude_watch.progress
        return {
            "loaded": directory,
            "changed": self._etude_digest != before,
            "progress": {name: progress[name] for name in requests if name in progress},
            "load_s": time.perf_counter() - began,
        }

    def _exchange_adapters(self, directory: str) -> None:
        """Loads adapters into the slot of the server's first ones: requests continue with them."""
        from vllm.lora.request import LoRARequest

        number = min(self.model_runner.list_loras(), default=1)
        path = Path(directory, "adapter")
        self.model_runner.add_lora(LoRARequest("etude-adapter", number, str(path), load_inplace=True))

    def etude_gap(self) -> dict[str, Any]:
        """`gap_s`: time between the last step before the last `etude_load` and the first after it, or None;
        `step_s`: median time between the starts of steps before it."""
        watch = self._etude_watch
        return {"gap_s": None, "step_s": None} if watch is None else watch.gap()

    def etude_take_routes(self, *requests: str) -> dict[str, Any]:
        """Returns and removes the routes of finished requests: `{request: {start, shape, dtype, data}}`,
        `data` in base64, [positions, layers, top_k]. Requests without known routes are left out."""
        routes = self._etude_routes
        found = {} if routes is None else {name: routes.take(name) for name in requests}
        return {name: document for name, document in found.items() if document is not None}


def _digest(model: torch.nn.Module) -> str:
    """Digest of all parameters as stored in memory, packed or not, and of adapters: a hash of the sums of
    their bits over rows and columns, which are computed on the parameters' device."""
    digest = hashlib.blake2b(digest_size=16)
    stacks = (getattr(module, f"lora_{side}_stacked", ()) for module in model.modules() for side in "ab")
    for parameter in itertools.chain(model.parameters(), *stacks):
        if parameter.numel():
            bits = parameter.data.contiguous().view(_INTEGERS[parameter.element_size()])
            rows = bits.reshape(-1, bits.shape[-1] if bits.ndim else 1)
            for dim in (0, 1):
                digest.update(rows.sum(dim, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def _expert_layers(model: Any) -> list[Any]:
    """The routed feed-forward layers, in order."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    return [module for module in model.modules() if isinstance(module, MoERunner)]


def _prepare_experts_again(layer: Any) -> None:
    """Makes every reload prepare the experts' weights as the first load did, before vLLM copies them into the
    storage that the kernel reads."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    method = layer._quant_method
    if not current_platform.is_cpu() or not isinstance(method, UnquantizedFusedMoEMethod):
        return
    set_up = method._setup_kernel

    def set_up_and_prepare(layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_update = method.moe_kernel is not None
        set_up(layer, w13, w2)
        if is_update:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = set_up_and_prepare


def _pack_heads_again(model: Any) -> None:
    """Makes embeddings and heads update their packed copies: a tied head is not reloaded itself."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)


def _wind_generators_back(runner: Any) -> None:
    """Patches the runner so that sampling a token that is discarded does not advance the row's generator."""
    sample, keep_books = runner.sample_tokens, runner._bookkeeping_sync

    def thrown_away() -> dict[int, torch.Generator]:
        batch = runner.input_batch
        mask = runner.discard_request_mask.np[: batch.num_reqs]
        return {row: own for row, own in batch.generators.items() if row < len(mask) and mask[row]}

    def sample_and_wind_back(*arguments: Any, **options: Any) -> Any:
        states = [(own, own.get_state()) for own in thrown_away().values()]
        result = sample(*arguments, **options)
        for own, state in states:
            own.set_state(state)
        return result

    def keep_books_without_them(*arguments: Any, **options: Any) -> Any:
        hidden = thrown_away()
        for row in hidden:
            del runner.input_batch.generators[row]
        try:
            return keep_books(*arguments, **options)
        finally:
            runner.input_batch.generators.update(hidden)

    runner.sample_tokens, runner._bookkeeping_sync = sample_and_wind_back, keep_books_without_them


class _Watch:
    """Wraps the runner's `execute_model` and records what each step computed."""

    def __init__(self, runner: Any) -> None:
        self.progress: OrderedDict[str, int] = OrderedDict()
        """Computed positions by request; finished ones are kept a while, as their readers may lag."""
        self.routes: _Routes | None = None
        self._began = self._ended = self._exchanged_after = 0.0
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)
        self._gap_s: float | None = None
        self._step_s: float | None = None
        self._is_exchanged = False
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_and_note, self._sample_and_note

    def note_exchange(self) -> None:
        """Records a weight swap."""
        self._step_s = statistics.median(self._intervals) if self._intervals else None
        self._is_exchanged, self._exchanged_after, self._gap_s = True, self._ended, None
        self._began = 0.0

    def gap(self) -> dict[str, Any]:
        """See EtudeWorker.etude_gap."""
        return {"gap_s": self._gap_s, "step_s": self._step_s}

    def _note_begin(self) -> None:
        now = time.perf_counter()
        if self._is_exchanged:
            self._gap_s, self._is_exchanged = now - self._exchanged_after, False
        if self._began:
            self._intervals.append(now - self._began)
        self._began = now

    def _sample_and_note(self, *arguments: Any, **options: Any) -> Any:
        result = self._sample(*arguments, **options)
        self._ended = time.perf_counter()
        return result

    def _execute_and_note(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        if scheduled.total_num_scheduled_tokens:
            self._note_begin()
        result = self._execute(scheduled, *arguments, **options)
        self._ended = time.perf_counter()
        if scheduled.total_num_scheduled_tokens:
            starts = _starts(scheduled)
            for request, start in starts.items():
                name, end = _name(request), start + scheduled.num_scheduled_tokens.get(request, 0)
                # After a preemption positions are recomputed, but no sampled token is withdrawn.
                self.progress[name] = max(end, self.progress.get(name, 0))
                self.progress.move_to_end(name)
            while len(self.progress) > _MAX_REQUESTS:
                self.progress.popitem(last=False)
            if self.routes is not None:
                self.routes.note(scheduled, starts)
        return result


class _Routes:
    """Recorded experts of every computed position, by request."""

    def __init__(self, runner: Any, layers: list[Any]) -> None:
        self._runner = runner
        self._chosen: list[torch.Tensor | None] = [None] * len(layers)
        self._dtype = torch.uint8
        self._held: OrderedDict[str, list[tuple[int, torch.Tensor]]] = OrderedDict()
        for index, layer in enumerate(layers):
            if layer.router.global_num_experts > 255:
                self._dtype = torch.uint16
            layer.router.set_capture_fn(partial(self._capture, index))

    def take(self, name: str) -> dict[str, Any] | None:
        parts = self._held.pop(name, None)
        if not parts:
            return None
        first = min(start for start, _ in parts)
        end = max(start + len(rows) for start, rows in parts)
        whole = torch.empty((end - first, *parts[0][1].shape[1:]), dtype=self._dtype)
        for start, rows in parts:
            whole[start - first : start - first + len(rows)] = rows
        data = base64.b64encode(whole.numpy().tobytes()).decode()
        dtype = str(self._dtype).removeprefix("torch.")
        return {"start": first, "shape": list(whole.shape), "dtype": dtype, "data": data}

    def note(self, scheduled: Any, starts: dict[str, int]) -> None:
        """Records a step, whose rows are grouped by request, in the order of the runner's batch."""
        total = scheduled.total_num_scheduled_tokens
        rows = torch.stack([chosen[:total] for chosen in self._chosen if chosen is not None], dim=1)
        rows = rows.to(device="cpu", dtype=self._dtype)
        offset = 0
        for request in self._runner.input_batch.req_ids:
            count = scheduled.num_scheduled_tokens.get(request, 0)
            if count and _REQUEST.search(request):
                part = (starts[request], rows[offset : offset + count])
                self._held.setdefault(_name(request), []).append(part)
            offset += count
        while len(self._held) > _MAX_REQUESTS:
            self._held.popitem(last=False)

    def _capture(self, index: int, chosen: torch.Tensor) -> None:
        self._chosen[index] = chosen


def _starts(scheduled: Any) -> dict[str, int]:
    """First position that the step computes, by request."""
    cached = scheduled.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts.update((new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs)
    return {request: int(start) for request, start in starts.items()}


def _name(request: str) -> str:
    """Étude's id of a request, which vLLM extends."""
    found = _REQUEST.search(request)
    return request if found is None else found.group()
