"""Servers over real engines that can be lent, and the weight store of a run that borrows them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from torch import Tensor

from etude.config import WeightsConfig
from etude.inference import Engine, EngineService
from etude.inference.exchange import Build
from etude.inference.loan_client import LoanHandle
from etude.inference.server import ServerState, build_app
from etude.inference.server.checkpoints import CheckpointWeights
from etude.inference.server.loans import Fetch, LoanDesk, fetch_from_store
from etude.model import LanguageModel, build_model
from etude.records import PolicyVersion, SampleRequest, SamplingParams, WeightManifest
from etude.weights import MemoryWeights, open_publisher
from tests.environment.recording.recording_builders import qwen_tokenizer
from tests.inference.server.serving import ADMIN, Served, qwen_model, serving, wait_for
from tests.model.builders import small_config

CONTEXT = 599
HOME = "tiny@0"
NUMERICS = {"device": "cpu", "kernels": "eager", "weight_dtype": "float32", "cache_dtype": "float32"}


def make_model(seed: int) -> LanguageModel:
    """The served architecture with other weights each."""
    model = build_model(small_config(max_positions=CONTEXT + 1), qwen_tokenizer().vocab_size)
    model.initialise(seed)
    return model


def lendable_app(
    states: list[ServerState], open_store: Callable[[str], Fetch] = fetch_from_store, slots: int = 8
) -> FastAPI:
    """An application over an engine in a thread of its own; its state goes into `states`."""
    tokenizer, model = qwen_tokenizer(), make_model(0)
    memory = MemoryWeights()
    weights = CheckpointWeights(model.config, memory)
    engine = Engine(model.config, tokenizer.vocab_size, slots, CONTEXT + 1)
    service = EngineService(engine, weights.fetch, None)
    manifest = memory.publish(PolicyVersion("tiny", 0), dict(model.named_parameters()))
    about = {
        "build": asdict(Build.here(model.config)),
        "numerics": NUMERICS,
        "tokenizer": tokenizer.digest,
        "max_context_tokens": CONTEXT,
    }
    desk = LoanDesk(service, manifest, about, open_store)
    state = ServerState(
        qwen_model(CONTEXT),
        service,
        desk.home,
        admin_token=ADMIN,
        loans=desk,
        failure=lambda: service.failure,
    )
    app = build_app(state)
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service, inner(app):
            await service.stage(manifest)
            await service.activate(manifest.version)
            yield

    app.router.lifespan_context = lifespan
    states.append(state)
    return app


@contextlib.contextmanager
def lendable(open_store: Callable[[str], Fetch] = fetch_from_store) -> Iterator[Served]:
    """Such a server that runs."""
    states: list[ServerState] = []
    app = lendable_app(states, open_store)
    with serving(states[0], app) as running:
        yield running


class RunStore:
    """Where a run publishes its weights."""

    def __init__(self, directory: Path) -> None:
        self.url = str(directory)
        self._publisher = open_publisher(WeightsConfig(url=self.url))

    def publish(self, step: int) -> WeightManifest:
        """Weights of that step."""
        manifest = self._publisher.publish(PolicyVersion("run", step), tensors_of(step))
        self._publisher.flush()
        return manifest

    def close(self) -> None:
        """Lets the next writer in."""
        self._publisher.close()


def tensors_of(step: int) -> dict[str, Tensor]:
    """Unlike those that users get."""
    return dict(make_model(100 + step).named_parameters())


def borrow(served: Served, store: str, lease_s: float = 60.0) -> LoanHandle:
    """Lends the server out, as a router would."""
    with served.http(ADMIN) as http:
        answer = http.post("/admin/loan", json={"borrower": "run", "lease_s": lease_s})
    assert answer.status_code == 201, answer.text
    return LoanHandle(served.url, answer.json()["token"], store)


def desk_of(served: Served) -> LoanDesk:
    """The server's own side of its loans."""
    assert served.state.loans is not None
    return served.state.loans


async def until_renewed(served: Served, times: int) -> None:
    """Returns when the loan under way has been renewed so often."""
    loan = desk_of(served).loan
    assert loan is not None
    for _ in range(times):
        before = loan.renewed_s
        await asyncio.to_thread(wait_for, lambda before=before: loan.renewed_s > before)


def standing(served: Served) -> dict[str, Any]:
    """What the server says of its loan."""
    with served.http(ADMIN) as http:
        return http.get("/admin/loan").json()


def rollout(session: str, number: int = 0, max_tokens: int = 8, **options: Any) -> SampleRequest:
    """Asks for a few tokens."""
    return SampleRequest(
        f"{session}:{number}",
        session,
        options.pop("suffix", np.arange(20, 40, dtype=np.int32)),
        SamplingParams(max_tokens=max_tokens),
        frozenset(),
        (7, len(session)),
        **options,
    )
