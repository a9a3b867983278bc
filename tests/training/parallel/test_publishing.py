"""Ranks that publish their own parts to a weight store, in real processes: the gathered model's bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.config.parallel import ParallelConfig
from etude.records import PolicyVersion
from etude.weights import StoreWeights, Subscriber, WeightStore
from etude.weights.manifest import describe_tensors
from tests.training.parallel.bodies import model_of
from tests.training.parallel.publishing import last_rank_dies, published
from tests.training.parallel.spawning import exit_codes, on_ranks


def _check(sizes: dict[str, int], directory: Path) -> None:
    config = ParallelConfig.model_validate(sizes)
    answers = on_ranks(published, config, str(directory), 3)
    digests, _, own = answers[0]
    assert all(answer[0] == digests for answer in answers)
    assert len(set(digests)) == 3
    assert [answer[1] for answer in answers] == [0] * config.ranks, "other bits than the gathered model's"
    model_bytes = sum(parameter.nbytes for parameter in model_of(0).parameters())
    assert sum(own) == model_bytes, "each weight is published by one rank"
    assert max(own) < 2 * model_bytes / config.ranks, "no rank has most of it"


@pytest.mark.parametrize(
    "sizes", [{"ranks": 2, "fsdp": 2}, {"ranks": 2, "expert": 2}, {"ranks": 2, "tensor": 2}]
)
def test_two_ranks_publish_the_gathered_model_bit_for_bit(sizes: dict[str, int], tmp_path: Path) -> None:
    _check(sizes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"ranks": 4, "fsdp": 2, "expert": 2},
        {"ranks": 4, "fsdp": 2, "tensor": 2},
        {"ranks": 3, "fsdp": 3},
    ],
)
def test_any_mesh_publishes_the_gathered_model_bit_for_bit(sizes: dict[str, int], tmp_path: Path) -> None:
    _check(sizes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2])
def test_a_rank_that_dies_in_a_publication_leaves_the_version_before_it(
    num_ranks: int, tmp_path: Path
) -> None:
    codes = exit_codes(last_rank_dies, ParallelConfig(ranks=num_ranks, fsdp=num_ranks), str(tmp_path))
    assert codes == [0] * (num_ranks - 1) + [7]
    store = WeightStore.open(str(tmp_path))
    (commit,) = store.commits().values()
    assert commit.version.step == 0
    tensors = dict(model_of(0).named_parameters())
    with StoreWeights(store) as publisher:  # the next run, alone
        subscriber = Subscriber(WeightStore.open(str(tmp_path)))
        found = subscriber.fetch(publisher.publish(PolicyVersion("run", 1), tensors))
    assert (
        describe_tensors(commit.version, found, "").tensors
        == describe_tensors(commit.version, tensors, "").tensors
    )
    kept = {file.name for commit in store.commits().values() for file in commit.files}
    assert set(store.folder.list("files")) == kept
