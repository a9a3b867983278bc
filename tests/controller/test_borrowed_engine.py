"""A replica that is recalled while it has sampled tokens that the run has not received yet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.controller.borrowed_engine import BorrowedEngine, Needs
from etude.controller.remote.engines import EngineProcess
from etude.inference.exchange import Event
from etude.inference.loan_client import LoanEndedError
from etude.records import SampleChunk
from tests.environment.recording.recording_builders import qwen_tokenizer
from tests.inference.server.lending import NUMERICS, RunStore, lendable, rollout, until_renewed
from tests.inference.server.serving import ADMIN


@pytest.mark.slow
@pytest.mark.parametrize("other", ["pulse", "exchange"])
def test_no_other_call_says_that_a_loan_has_ended_before_its_tokens_are_told(
    tmp_path: Path, other: str
) -> None:
    store, ended = RunStore(tmp_path), asyncio.Event()
    arguments = {"exchange": ([("open", "late")],)}.get(other, ())

    async def run() -> None:
        with lendable() as served, served.http(ADMIN) as http:
            lent = http.post("/admin/loan", json={"borrower": "run", "lease_s": 60.0}).json()
            needs = Needs(NUMERICS, qwen_tokenizer().digest, 100)
            engine = BorrowedEngine(served.url, lent["token"], store.url, needs, ended.set)
            await engine.call(EngineProcess.begin)
            manifest = store.publish(1)
            await engine.call(EngineProcess.stage, manifest)
            await engine.call(EngineProcess.activate, manifest.version, "recompute")
            await engine.call(
                EngineProcess.exchange, [("open", "a"), ("stream", rollout("a", max_tokens=500))]
            )
            events: list[Event] = await engine.call(EngineProcess.poll)
            await asyncio.to_thread(http.delete, "/admin/loan")
            asked = asyncio.ensure_future(engine.send(other, arguments, {}))
            await ended.wait()
            with pytest.raises(LoanEndedError):
                while True:
                    assert not asked.done(), "whoever hears that has no need of the rest"
                    await asyncio.sleep(0.05)
                    events += await engine.call(EngineProcess.poll)
            with pytest.raises(LoanEndedError):
                await asked
            chunks = [item for _, item in events if isinstance(item, SampleChunk)]
            assert chunks[-1].finish in ("abort", "length", "stop")
            await engine.stop()

    asyncio.run(run())
    store.close()


def test_an_engine_on_loan_renews_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.inference.loan_client._RENEWALS", 600.0)
    store = RunStore(tmp_path)

    async def run() -> None:
        with lendable() as served, served.http(ADMIN) as http:
            lent = http.post("/admin/loan", json={"borrower": "run", "lease_s": 60.0}).json()
            needs = Needs(NUMERICS, qwen_tokenizer().digest, 100)
            engine = BorrowedEngine(served.url, lent["token"], store.url, needs)
            await engine.call(EngineProcess.begin)
            await until_renewed(served, 3)
            await engine.stop()

    asyncio.run(run())
    store.close()
