import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.controller.local import LocalHandle
from etude.controller.remote.engine_part import Build, EnginePart
from etude.controller.remote.fleet import check_build
from etude.errors import ConfigError, PartLostError, PrefixMissError, SamplerError, WeightUpdateError
from etude.records import WeightManifest
from tests.controller.remote.building import FAST, Fleet, config, request, sample, until


def test_requests_are_answered_by_the_version_that_was_activated(tmp_path: Path) -> None:
    async def run() -> None:
        made = Fleet(tmp_path)
        fleet = made.fleet
        await fleet.start()
        assert fleet.current() is None
        for step in (0, 1):
            version = await made.serve(step)
            assert fleet.current() == version
            sessions = [f"s{step}-{number}" for number in range(4)]
            for session in sessions:
                fleet.open(session)
            answers = await asyncio.gather(*(sample(fleet, request(session)) for session in sessions))
            for chunks in answers:
                assert {chunk.version for chunk in chunks} == {version}
                assert sum(len(chunk.tokens) for chunk in chunks) == 6
                assert chunks[-1].finish == "length"
            scores = await fleet.score(np.arange(9, dtype=np.int32), version)
            assert scores.version == version
            for session in sessions:
                fleet.close(session)
        assert fleet.counters.decode_tokens >= 0
        await until(lambda: fleet.counters.decode_tokens >= 8 * 5)
        await fleet.shutdown()

    asyncio.run(run())


def test_an_engine_in_a_process_of_its_own_has_its_number_of_compute_threads(tmp_path: Path) -> None:
    async def run() -> None:
        made = Fleet(tmp_path, 1)
        engine = made.config.engine.model_copy(update={"num_threads": before + 1})
        made.config = made.config.model_copy(update={"engine": engine})
        await made.fleet.start()
        assert torch.get_num_threads() == before + 1
        await made.fleet.shutdown()

    before = torch.get_num_threads()
    try:
        asyncio.run(run())
    finally:
        torch.set_num_threads(before)


def test_a_session_goes_on_after_its_engine_was_killed(tmp_path: Path) -> None:
    async def run() -> None:
        made = Fleet(tmp_path, num_engines=1)
        fleet = made.fleet
        await fleet.start()
        version = await made.serve(3)
        fleet.open("s")
        first = await sample(fleet, request("s"))
        digest = first[-1].prefix_digest
        made.newest("engine-0").kill()
        with pytest.raises(PrefixMissError):
            await sample(fleet, request("s", 1, prefix_digest=digest))
        again = await sample(fleet, request("s", 2, suffix=np.arange(8, dtype=np.int32)))
        assert {chunk.version for chunk in again} == {version}, "it serves nothing before it has the version"
        assert made.journal.counts == {"lost": 1, "restarted": 1}
        await until(lambda: fleet.counters.decode_tokens >= 5)
        await fleet.shutdown()

    asyncio.run(run())


def test_what_is_in_flight_when_an_engine_dies_is_sampled_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        made = Fleet(tmp_path)
        fleet = made.fleet
        await fleet.start()
        await made.serve(0)
        sessions = [f"s{number}" for number in range(6)]
        for session in sessions:
            fleet.open(session)
        going = [asyncio.ensure_future(sample(fleet, request(s, max_tokens=60))) for s in sessions]
        await asyncio.sleep(0.02)
        made.newest("engine-1").kill()
        answers = await asyncio.gather(*going)
        assert all(sum(len(chunk.tokens) for chunk in chunks) == 60 for chunks in answers)
        await fleet.shutdown()

    asyncio.run(run())


def test_an_engine_that_comes_back_late_gets_the_version_that_is_served_by_then(tmp_path: Path) -> None:
    async def run() -> None:
        made = Fleet(tmp_path)
        fleet = made.fleet
        await fleet.start()
        await made.serve(0)
        made.hindered = [PartLostError("no room")] * 2
        made.newest("engine-0").kill()
        version = await made.serve(1)
        await until(lambda: len(made.handles["engine-0"]) == 2)
        await until(lambda: "restarted" in made.journal.counts)
        assert made.newest("engine-0").part._service.current() == version
        assert made.newest("engine-1").part._service.current() == version
        await fleet.shutdown()

    asyncio.run(run())


def test_an_engine_that_cannot_stage_is_replaced_and_weights_that_fit_nowhere_are_refused(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        made = Fleet(tmp_path)
        fleet = made.fleet
        await fleet.start()
        served = await made.serve(0)
        bad = made.publish(1)
        (Path(bad.url.removeprefix("file://")) / "model.safetensors").write_bytes(b"cut off")
        with pytest.raises(WeightUpdateError, match="cannot be read"):
            await fleet.stage(bad)
        assert fleet.current() == served
        assert made.journal.counts == {}

        async def fail(manifest: object) -> None:
            raise WeightUpdateError("a disk of its own")

        made.newest("engine-0").part.stage = fail  # type: ignore[method-assign]
        version = await made.serve(2)
        await until(lambda: "restarted" in made.journal.counts)
        assert made.newest("engine-0").part._service.current() == version
        await fleet.shutdown()

    asyncio.run(run())


def test_weights_that_every_engine_dies_of_are_given_up_after_some_rounds(tmp_path: Path) -> None:
    async def run() -> None:
        # None is ever given up: each is counted as healthy before it dies.
        settings = FAST.model_copy(update={"healthy_s": 1e-9})
        made = Fleet(tmp_path, settings=settings)
        await made.fleet.start()
        served = await made.serve(0)
        num_deaths = 0

        def make_mortal(handle: LocalHandle[EnginePart]) -> None:
            stage = handle.part.stage

            async def die_of_later_ones(manifest: WeightManifest) -> None:
                nonlocal num_deaths
                if manifest.version.step == 0:
                    return await stage(manifest)
                num_deaths += 1
                handle.kill()
                raise PartLostError("was killed for its memory")

            handle.part.stage = die_of_later_ones  # type: ignore[method-assign]

        made.on_spawn = make_mortal
        for name in made.handles:
            make_mortal(made.newest(name))
        with pytest.raises(PartLostError, match="memory"):
            await made.serve(1)
        assert num_deaths >= settings.give_up_after
        assert made.fleet.current() == served
        assert await sample(made.fleet, request("s"))
        await made.fleet.shutdown()

    asyncio.run(run())


def test_a_request_gives_up_when_no_engine_comes_back_in_time(tmp_path: Path) -> None:
    async def run() -> None:
        settings = FAST.model_copy(update={"patience_s": 0.2, "backoff_s": 60.0, "most_backoff_s": 60.0})
        made = Fleet(tmp_path, 1, settings)
        await made.fleet.start()
        await made.serve(0)
        made.newest("engine-0").kill()
        await until(lambda: "lost" in made.journal.counts)
        with pytest.raises(SamplerError):
            await sample(made.fleet, request("s"))
        with pytest.raises(PartLostError, match="did not come back"):
            await made.serve(1)
        await made.fleet.shutdown()

    asyncio.run(run())


def test_errors_of_a_request_reach_who_asked_and_harm_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        made = Fleet(tmp_path, 1)
        await made.fleet.start()
        await made.serve(0)
        made.fleet.open("s")
        with pytest.raises(SamplerError, match="tokens"):
            await sample(made.fleet, request("s", suffix=np.arange(5_000, dtype=np.int32) % 200))
        await asyncio.sleep(0.1)
        assert made.journal.counts == {}
        await made.fleet.shutdown()

    asyncio.run(run())


def test_a_replica_of_another_build_or_architecture_is_refused(tmp_path: Path) -> None:
    here = Build.here(config(tmp_path).model)
    check_build(here, here, "engine-0")
    other = Build("aarch64", here.byte_order, {**here.versions, "torch": "1.0"}, here.model)
    with pytest.raises(
        ConfigError, match=r"engine-0: .*machine: .* here, aarch64 there.*torch: .*1\.0 there"
    ):
        check_build(other, here, "engine-0")
    wider = tmp_path / "wider"
    model = Build.here(config(wider).model.model_copy(update={"num_layers": 3}))
    with pytest.raises(ConfigError, match="model"):
        check_build(model, here, "engine-0")
