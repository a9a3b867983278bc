"""The sampler over the fake server, which computes with small models of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import PrefixMissError, SamplerError, WeightUpdateError
from etude.inference.vllm import Probe, Replica, SnapshotDirectory, VllmSampler
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion, WeightManifest
from tests.fakes.vllm import FakeServer
from tests.inference.vllm.builders import Reader, asynchronous, publish, tiny_model, tokens

MODELS = {step: tiny_model(step, max_positions=256) for step in range(3)}


class Setting:
    """A sampler, its fake server, and three published versions."""

    def __init__(self, root: Path, **options: Any) -> None:
        make_server: type[FakeServer] = options.pop("server", FakeServer)
        self.server = make_server(loads_at_start=options.pop("loads_at_start", True))
        self.root = SnapshotDirectory(root, keep=8)
        self.manifests = [publish(self.root, model, step) for step, model in MODELS.items()]
        self.sampler = VllmSampler(Replica(self.server, **options))

    @property
    def engine(self) -> Any:
        assert self.server.engine is not None
        return self.server.engine

    async def serve(self, manifest: WeightManifest, kv: Any = "keep") -> None:
        await self.sampler.stage(manifest)
        await self.sampler.activate(manifest.version, kv)

    async def sampling(self, count: int) -> None:
        """Returns when so many requests have sampled something."""
        async with asyncio.timeout(60):
            while sum(len(job.sampled) > 3 for job in self.engine.jobs.values()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def reader(self, name: str = "session") -> Reader:
        self.sampler.open(name)
        return Reader(name)


@asynccontextmanager
async def served(root: Path, **options: Any) -> AsyncIterator[Setting]:
    setting = Setting(root, **options)
    async with setting.sampler:
        await setting.serve(setting.manifests[0])
        yield setting


def check(reader: Reader, temperature: float = 1.0) -> None:
    """Sampled tokens have the log-probabilities that their own versions give them."""
    whole = np.array(reader.tokens, dtype=np.int32)
    scores = {
        step: score_sequences(model, [whole], temperature=temperature)[0] for step, model in MODELS.items()
    }
    for place, version in enumerate(reader.versions):
        if version is not None:
            assert abs(reader.logprobs[place] - scores[version.step][place]) < 1e-4


@asynchronous
async def test_nothing_is_served_before_a_version_is_active(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    async with setting.sampler as sampler:
        reader = setting.reader()
        with pytest.raises(SamplerError, match="no weights yet"):
            await reader.ask(sampler, [1, 2, 3])
        await sampler.stage(setting.manifests[0])
        assert sampler.current() is None
        with pytest.raises(SamplerError, match="no weights yet"):
            await reader.ask(sampler, [1, 2, 3])


@asynchronous
async def test_a_session_of_many_messages_has_true_logprobs_and_all_routes(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        for turn in range(3):
            await reader.ask(setting.sampler, tokens(9, turn).tolist(), streaming=turn == 1)
            assert reader.chunks[-1].finish == "length"
        check(reader)
        assert sum(reader.sampled) == 24
        assert sorted(reader.routes) == list(range(len(reader.tokens) - 1))
        assert {version for version in reader.versions if version} == {setting.manifests[0].version}


@asynchronous
async def test_the_same_key_samples_the_same_tokens_and_another_does_not(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        found = []
        for number, key in enumerate(((1, 2), (1, 2), (1, 3))):
            reader = setting.reader(f"s{number}")
            await reader.ask(setting.sampler, [5, 6, 7], max_tokens=20, rng_key=key)
            found.append(reader.tokens)
        assert found[0] == found[1] != found[2]


@asynchronous
async def test_a_stop_token_ends_a_message_and_is_part_of_it(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        first = setting.reader("first")
        await first.ask(setting.sampler, [5, 6, 7], temperature=0.0)
        stop = first.tokens[5]
        again = setting.reader("again")
        await again.ask(setting.sampler, [5, 6, 7], temperature=0.0, stop_tokens=frozenset({stop}))
        assert again.chunks[-1].finish == "stop"
        assert again.tokens == first.tokens[: first.tokens.index(stop, 3) + 1]


@asynchronous
async def test_alternatives_come_best_first(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        chunks = await reader.ask(setting.sampler, [1, 2, 3], top_logprobs=4, raw_logprobs=True)
        top, names = chunks[-1].top_logprobs, chunks[-1].top_tokens
        assert top is not None and names is not None and top.shape == names.shape == (8, 4)
        assert (np.diff(top, axis=1) <= 0).all()
        np.testing.assert_array_equal(chunks[-1].raw_logprobs, chunks[-1].logprobs)


@asynchronous
async def test_a_prefix_that_is_not_held_must_be_sent_again(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        await reader.ask(setting.sampler, [1, 2, 3])
        digest, reader.digest = reader.digest, "something else"
        with pytest.raises(PrefixMissError):
            await reader.ask(setting.sampler, [4])
        assert digest is not None
        reader.digest = None
        await reader.ask(setting.sampler, [5])
        check(reader)
        assert sorted(reader.routes) == list(range(len(reader.tokens) - 1))


@asynchronous
async def test_an_abort_ends_a_message_with_what_was_sampled(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        for streaming in (False, True):
            reader = setting.reader(f"s{streaming}")
            asked = asyncio.create_task(
                reader.ask(setting.sampler, [1, 2, 3], max_tokens=200, streaming=streaming)
            )
            await setting.sampling(1)
            setting.sampler.abort(f"{reader.id}:1")
            await asyncio.wait_for(asked, 60)
            assert reader.chunks[-1].finish == "abort"
            assert 0 < sum(reader.sampled) < 200
            await reader.ask(setting.sampler, [4])
            check(reader)


@pytest.mark.parametrize("streaming", [False, True])
@asynchronous
async def test_an_abort_that_overtakes_its_request_ends_it_all_the_same(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.inference.vllm.sampler._ABORT_AGAIN_S", 0.02)
    async with served(tmp_path) as setting:
        setting.engine.was_aborted.clear()
        setting.engine.faults.add("abort_overtakes")
        reader = setting.reader()
        asked = asyncio.create_task(
            reader.ask(setting.sampler, [1, 2, 3], max_tokens=250, streaming=streaming)
        )
        while not setting.sampler.replica.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        setting.sampler.abort(f"{reader.id}:1")
        await asyncio.wait_for(asked, 60)
        assert reader.chunks[-1].finish == "abort"
        assert sum(reader.sampled) < 250


@asynchronous
async def test_an_abort_while_there_is_no_server_ends_the_request_before_it_is_sent(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        await reader.ask(setting.sampler, [1, 2, 3])
        started = len(setting.server.starts)
        settled = setting.sampler.replica._settled
        settled.clear()  # as while weights are exchanged, or the server begins again
        asked = asyncio.create_task(reader.ask(setting.sampler, [4], max_tokens=250))
        await asyncio.sleep(0)
        setting.sampler.abort(f"{reader.id}:2")
        async with asyncio.timeout(60):
            await asked
        assert [(chunk.finish, len(chunk.tokens)) for chunk in reader.chunks] == [("abort", 0)]
        settled.set()
        again = setting.reader("again")
        await again.ask(setting.sampler, [1, 2])
        assert again.chunks[-1].finish == "length"
        assert len(setting.server.starts) == started and not setting.sampler._waiting


@asynchronous
async def test_time_that_a_request_waited_for_the_server_counts_for_its_deadline(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        loop, ends = asyncio.get_running_loop(), list[float]()
        call_at = loop.call_at

        def note(when: float, callback: Any, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
            if callback == setting.sampler.abort:
                ends.append(when)
            return call_at(when, callback, *arguments, **options)

        loop.call_at = note  # type: ignore[method-assign]
        reader = setting.reader()
        settled = setting.sampler.replica._settled
        settled.clear()
        asked = asyncio.create_task(reader.ask(setting.sampler, [1, 2], deadline_s=1000.0))
        await asyncio.sleep(0)
        waits_since = loop.time()
        await asyncio.sleep(0.05)
        settled.set()
        await asked
        assert ends and max(ends) <= waits_since + 1000.0


@asynchronous
async def test_a_deadline_aborts(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        await reader.ask(setting.sampler, [1, 2, 3], max_tokens=250, deadline_s=0.15)
        assert reader.chunks[-1].finish == "abort"


@asynchronous
async def test_a_stream_that_is_left_frees_its_request(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        stream = setting.sampler.stream(reader.request([1, 2, 3], max_tokens=200, streaming=True))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while setting.engine.jobs:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await Reader("session").ask(setting.sampler, [1, 2])


@asynchronous
async def test_tokens_that_would_kill_the_engine_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        for wrong in ([256], [-1], list(range(256)), []):
            with pytest.raises(SamplerError):
                await reader.ask(setting.sampler, wrong)
            reader.tokens.clear()
        await Reader("session").ask(setting.sampler, [1])


@pytest.mark.slow
@asynchronous
async def test_requests_in_flight_go_on_through_an_update_and_say_which_version_each_token_has(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as setting:
        await setting.sampler.stage(setting.manifests[1])
        readers = [setting.reader(f"s{number}") for number in range(4)]
        asked = [
            asyncio.create_task(
                reader.ask(setting.sampler, tokens(8, n).tolist(), max_tokens=60, streaming=n % 2 == 0)
            )
            for n, reader in enumerate(readers)
        ]
        await setting.sampling(4)
        await setting.sampler.activate(setting.manifests[1].version, "recompute")
        await asyncio.gather(*asked)
        for reader in readers:
            steps = [version.step for version in reader.versions if version is not None]
            assert set(steps) == {0, 1} and steps == sorted(steps)
            oldest = [version.step for version in reader.kv_oldest if version is not None]
            assert oldest == steps, "all keys were computed again"
            check(reader)
        assert setting.engine.resets == 1


@asynchronous
async def test_how_far_requests_were_at_an_update_is_forgotten_with_them(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        asked = asyncio.create_task(reader.ask(setting.sampler, [1, 2, 3], max_tokens=100))
        await setting.sampling(1)
        await setting.serve(setting.manifests[1])
        history = setting.sampler.replica.history
        assert [len(activation.progress) for activation in history._order] == [0, 1]
        await asked
        check(reader)
        assert [len(activation.progress) for activation in history._order] == [0, 0]


@pytest.mark.slow
@asynchronous
async def test_kept_keys_are_named_by_their_oldest_version(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        await setting.sampler.stage(setting.manifests[1])
        asked = asyncio.create_task(reader.ask(setting.sampler, [1, 2, 3], max_tokens=200))
        await setting.sampling(1)
        await setting.sampler.activate(setting.manifests[1].version, "keep")
        await asked
        assert {version.step for version in reader.versions if version is not None} == {0, 1}
        assert {version.step for version in reader.kv_oldest if version is not None} == {0}


@pytest.mark.slow
@asynchronous
@pytest.mark.parametrize("fault", ["loads_nothing", "loads_half", "load_fails"])
async def test_an_update_that_vllm_gets_wrong_leaves_the_old_version_serving(
    tmp_path: Path, fault: Any
) -> None:
    async with served(tmp_path) as setting:
        running = setting.reader("running")
        await setting.sampler.stage(setting.manifests[1])
        asked = asyncio.create_task(running.ask(setting.sampler, [1, 2, 3], max_tokens=100))
        await setting.sampling(1)
        setting.engine.faults.add(fault)
        with pytest.raises(WeightUpdateError, match=r"in service is run@0"):
            await setting.sampler.activate(setting.manifests[1].version)
        with pytest.raises(SamplerError):
            await asked
        assert setting.sampler.current() == setting.manifests[0].version
        assert len(setting.server.starts) == 2
        reader = setting.reader("after")
        await reader.ask(setting.sampler, [1, 2, 3])
        check(reader)
        assert reader.versions[-1] == setting.manifests[0].version
        await setting.serve(setting.manifests[2])
        await reader.ask(setting.sampler, [4])
        assert reader.versions[-1] == setting.manifests[2].version


@pytest.mark.slow
@asynchronous
async def test_weights_that_were_not_loaded_are_found_out_however_small_the_update(tmp_path: Path) -> None:
    """The probe's log-probabilities move by less than it allows."""
    small = tiny_model(0, max_positions=256)
    with torch.no_grad():
        small.embedding[0, 0] += 1e-6
    async with served(tmp_path) as setting:
        again, updated = (publish(setting.root, model, 5) for model in (MODELS[0], small))
        await setting.serve(again)  # of the same digest: nothing has to change
        setting.engine.faults.add("loads_nothing")
        with pytest.raises(WeightUpdateError, match="its parameters are unchanged"):
            await setting.serve(updated)
        await setting.serve(updated)
        assert setting.sampler.current() == updated.version


@asynchronous
async def test_an_update_that_the_end_overtakes_is_refused_and_begins_nothing_again(tmp_path: Path) -> None:
    setting, is_loading, is_ended = Setting(tmp_path), asyncio.Event(), asyncio.Event()

    async def load(*_: Any, **__: Any) -> Any:
        is_loading.set()
        await is_ended.wait()
        raise SamplerError("vLLM does not answer")

    async with setting.sampler as sampler:
        await setting.serve(setting.manifests[0])
        await sampler.stage(setting.manifests[1])
        client = await sampler.replica.client()
        client.call_workers = load
        updating = asyncio.create_task(sampler.activate(setting.manifests[1].version))
        await is_loading.wait()
    is_ended.set()
    with pytest.raises(WeightUpdateError, match="in service is None"):
        await updating
    assert setting.server.engine is None


@asynchronous
async def test_a_server_that_begins_again_while_it_is_closed_is_not_left_behind(tmp_path: Path) -> None:
    is_starting, is_ended = asyncio.Event(), asyncio.Event()

    class Slow(FakeServer):
        async def start(self, directory: Path) -> str:
            url = await FakeServer.start(self, directory)
            if len(self.starts) > 1:
                is_starting.set()
                await is_ended.wait()
            return url

    setting = Setting(tmp_path, server=Slow)
    async with setting.sampler as sampler:
        await setting.serve(setting.manifests[0])
        wrong = publish(setting.root, MODELS[1], 7, Probe.of(MODELS[2]))
        await sampler.stage(wrong)
        updating = asyncio.create_task(sampler.activate(wrong.version))
        async with asyncio.timeout(60):
            await is_starting.wait()
    is_ended.set()
    with pytest.raises(WeightUpdateError, match="in service is None"):
        await updating
    assert setting.server.engine is None
    assert len(setting.server.starts) == 2


@asynchronous
async def test_a_server_that_is_closed_while_it_begins_again_is_not_begun_once_more(tmp_path: Path) -> None:
    setting, is_checking = Setting(tmp_path), asyncio.Event()
    replica = setting.sampler.replica
    verify = replica._verify

    async def verify_later(*arguments: Any) -> None:
        if len(setting.server.starts) > 1:
            is_checking.set()
            await setting.server._ended.wait()
        await verify(*arguments)

    replica._verify = verify_later  # type: ignore[method-assign]
    async with setting.sampler:
        await setting.serve(setting.manifests[0])
        setting.server.die()
        async with asyncio.timeout(60):
            await is_checking.wait()
    async with asyncio.timeout(60):
        while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 (nobody tells of what was left behind)
            await asyncio.sleep(0.01)
    assert len(setting.server.starts) == 2
    assert setting.server.engine is None


@asynchronous
async def test_a_server_that_cannot_be_watched_counts_as_gone(tmp_path: Path) -> None:
    fails = asyncio.Event()

    class Unwatched(FakeServer):
        async def wait_for_end(self) -> str:
            await fails.wait()
            raise OSError("no log")

    setting = Setting(tmp_path, server=Unwatched)
    async with setting.sampler as sampler:
        await setting.serve(setting.manifests[0])
        fails.set()
        async with asyncio.timeout(60):
            while sampler.failure is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(SamplerError, match="no log"):
            await setting.reader().ask(sampler, [1, 2])


@asynchronous
async def test_no_token_of_refused_weights_is_handed_out(tmp_path: Path) -> None:
    wrong = Probe.of(MODELS[2])
    async with served(tmp_path) as setting:
        manifest = publish(setting.root, MODELS[1], 7, wrong)
        reader = setting.reader()
        await setting.sampler.stage(manifest)
        asked = asyncio.create_task(reader.ask(setting.sampler, [1, 2], max_tokens=100, streaming=True))
        await setting.sampling(1)
        with pytest.raises(WeightUpdateError):
            await setting.sampler.activate(manifest.version)
        with pytest.raises(SamplerError):
            await asked
        assert sum(reader.sampled) > 0
        assert {version for version in reader.versions if version} == {setting.manifests[0].version}


@asynchronous
async def test_a_damaged_or_foreign_snapshot_is_refused_before_vllm_hears_of_it(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        path = Path(setting.manifests[1].url.removeprefix("file://")) / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        with pytest.raises(WeightUpdateError, match="differs from the manifest"):
            await setting.sampler.stage(setting.manifests[1])
        other = publish(setting.root, tiny_model(0, max_positions=256, expert_size=32), 5)
        with pytest.raises(WeightUpdateError, match="the tensors differ"):
            await setting.sampler.stage(other)
        with pytest.raises(WeightUpdateError, match="not staged"):
            await setting.sampler.activate(other.version)
        assert not setting.engine.loads


@asynchronous
async def test_a_crash_fails_what_is_in_flight_and_the_server_begins_again(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        asked = asyncio.create_task(reader.ask(setting.sampler, [1, 2, 3], max_tokens=200))
        await setting.sampling(1)
        setting.server.die()
        with pytest.raises(SamplerError):
            await asked
        again = setting.reader("again")
        await again.ask(setting.sampler, [1, 2, 3])
        check(again)
        assert again.versions[-1] == setting.manifests[0].version
        assert len(setting.server.starts) == 2


@asynchronous
async def test_a_server_that_cannot_begin_again_says_so(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        setting.server.fails_to_start = 3
        setting.server.die()
        while setting.sampler.current() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        reader = setting.reader()
        with pytest.raises(SamplerError, match="vLLM is down"):
            await reader.ask(setting.sampler, [1, 2, 3])
        assert setting.sampler.current() is None


@asynchronous
async def test_a_server_of_unknown_weights_is_given_the_named_ones_first(tmp_path: Path) -> None:
    async with served(tmp_path, loads_at_start=False) as setting:
        directory = setting.manifests[0].url.removeprefix("file://")
        assert setting.engine.loads == [directory]
        reader = setting.reader()
        await reader.ask(setting.sampler, [1, 2, 3])
        check(reader)


@asynchronous
async def test_scores_are_those_of_the_version_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        given = tokens(20, 3)
        scores = await setting.sampler.score(given, setting.manifests[0].version)
        np.testing.assert_allclose(scores.logprobs, score_sequences(MODELS[0], [given])[0], atol=1e-5)
        assert scores.routes is not None and scores.routes.shape == (20, 2, 2)
        with pytest.raises(SamplerError, match="not served"):
            await setting.sampler.score(given, PolicyVersion("run", 9))


@asynchronous
async def test_a_pinned_version_is_served_or_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        await reader.ask(setting.sampler, [1], version=setting.manifests[0].version)
        with pytest.raises(SamplerError, match="not served"):
            await reader.ask(setting.sampler, [1], version=PolicyVersion("run", 3), version_is_minimum=True)


@asynchronous
async def test_what_vllm_cannot_report_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        with pytest.raises(SamplerError, match="only processed log-probabilities"):
            await reader.ask(setting.sampler, [1], raw_logprobs=True, temperature=0.5)


@asynchronous
async def test_a_server_that_dies_of_an_update_is_given_it_once_more(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        await setting.sampler.stage(setting.manifests[1])
        setting.engine.faults.add("dies_when_sampling")
        await setting.sampler.activate(setting.manifests[1].version)
        assert setting.sampler.current() == setting.manifests[1].version
        assert [path.name.split("-")[1] for path in setting.server.starts] == ["00000000", "00000000"]
        reader = setting.reader()
        await reader.ask(setting.sampler, [1, 2, 3])
        check(reader)
        assert reader.versions[-1] == setting.manifests[1].version


@asynchronous
async def test_vllm_is_paused_only_where_keys_must_be_computed_again(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        await setting.serve(setting.manifests[1], "keep")
        assert setting.engine.pauses == 0
        await setting.serve(setting.manifests[2], "recompute")
        assert setting.engine.pauses == 1


@asynchronous
async def test_the_first_chunk_says_how_much_of_the_prompt_was_cached(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        for expected in (0, 10):
            chunks = await reader.ask(setting.sampler, [1, 2, 3])
            assert chunks[0].cached_tokens == expected
        streamed = await reader.ask(setting.sampler, [1, 2, 3], streaming=True)
        assert [chunk.cached_tokens for chunk in streamed] == [None] * len(streamed)
        counters = setting.sampler.counters
        assert (counters.decode_tokens, counters.prefill_tokens, counters.cached_tokens) == (24, 11, 31)


@asynchronous
async def test_the_end_waits_for_what_is_in_flight_and_takes_no_more(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        asked = asyncio.create_task(reader.ask(setting.sampler, [1, 2, 3], max_tokens=40))
        await setting.sampling(1)
        draining = asyncio.create_task(setting.sampler.drain(60.0))
        await asyncio.sleep(0)
        with pytest.raises(SamplerError, match="being stopped"):
            await setting.reader("late").ask(setting.sampler, [1])
        await draining
        await asked
        assert reader.chunks[-1].finish == "length" and sum(reader.sampled) == 40


@asynchronous
async def test_what_is_in_flight_too_long_is_aborted_at_the_end(tmp_path: Path) -> None:
    async with served(tmp_path) as setting:
        reader = setting.reader()
        asked = asyncio.create_task(reader.ask(setting.sampler, [1, 2, 3], max_tokens=250))
        await setting.sampling(1)
        await setting.sampler.drain(0.0)
        await asked
        assert reader.chunks[-1].finish == "abort"
