"""Published snapshots compute the same as the given tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.config import AdapterConfig
from etude.errors import StoreError, WeightUpdateError
from etude.inference.vllm import FetchedSnapshots, ModelSnapshots, Probe, SnapshotDirectory, open_snapshot
from etude.inference.vllm.snapshots import ADAPTER, check_same_shapes
from etude.kit.durable import DRAFTS
from etude.model import LanguageModel
from etude.model.loading import AnyModel, load_any_model
from etude.model.transformers_model import TransformersModel
from etude.records import PolicyVersion
from etude.weights import MemoryWeights
from tests.fakes.disk import full_disk
from tests.inference.vllm.builders import adapted_model, move_adapters, tiny_model
from tests.model import transformers_builders


def tied_glm() -> TransformersModel:
    return transformers_builders.tiny_model("glm4_moe", tie_word_embeddings=True)


@pytest.mark.parametrize("make", [lambda: tiny_model(0), tied_glm])
def test_a_snapshot_holds_the_given_tensors_and_their_probe(
    make: Callable[[], AnyModel], tmp_path: Path
) -> None:
    model = make()
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    weights = ModelSnapshots(SnapshotDirectory(tmp_path), model)
    doubled = {name: tensor * 1.5 for name, tensor in before.items()}
    manifest = weights.publish(PolicyVersion("run", 3), doubled)
    assert manifest.version.step == 3
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name]), "the model that learns is not touched"
    snapshot = open_snapshot(manifest)
    loaded = Probe.of(load_any_model(snapshot.directory))
    np.testing.assert_allclose(snapshot.probe.logprobs, loaded.logprobs, atol=1e-5)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(doubled[name])
    np.testing.assert_allclose(Probe.of(model).logprobs, loaded.logprobs, atol=1e-5)


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    weights = ModelSnapshots(SnapshotDirectory(tmp_path), tiny_model(0))
    with pytest.raises(WeightUpdateError, match="not the model"):
        weights.publish(PolicyVersion("run", 0), dict(tiny_model(0, "qwen3").named_parameters()))
    assert not list(tmp_path.iterdir())


def test_weights_that_are_published_again_lie_as_they_lay(tmp_path: Path) -> None:
    model = tiny_model(0)
    weights = ModelSnapshots(SnapshotDirectory(tmp_path, keep=3), model)
    tensors = dict(model.named_parameters())
    first = weights.publish(PolicyVersion("run", 0), tensors)
    directory = open_snapshot(first).directory
    inode = (directory / "model.safetensors").stat().st_ino
    (tmp_path / f"{DRAFTS}killed").mkdir()
    for step in (1, 2):
        weights.publish(PolicyVersion("run", step), tensors)
    assert weights.publish(PolicyVersion("run", 0), tensors) == first
    assert (directory / "model.safetensors").stat().st_ino == inode, "somebody may be reading it"
    weights.publish(PolicyVersion("run", 3), tensors)
    assert directory.exists(), "and it counts as new"
    assert not list(tmp_path.glob(".*")), "what a killed writer left is gone"


@pytest.mark.parametrize("name", ["model.safetensors", "etude.json"])
def test_weights_that_are_damaged_are_whole_when_they_are_published_again(name: str, tmp_path: Path) -> None:
    model = tiny_model(0)
    weights = ModelSnapshots(SnapshotDirectory(tmp_path), model)
    tensors = dict(model.named_parameters())
    manifest = weights.publish(PolicyVersion("run", 0), tensors)
    file = open_snapshot(manifest).directory / name
    file.write_bytes(file.read_bytes()[:100])  # as a machine may leave it that stops
    with pytest.raises(WeightUpdateError, match="publish the current version again"):
        open_snapshot(manifest)
    assert weights.publish(PolicyVersion("run", 0), tensors) == manifest
    open_snapshot(manifest)


def test_what_a_store_holds_is_written_here_under_the_version_of_the_store(tmp_path: Path) -> None:
    model, store = tiny_model(3), MemoryWeights()
    rounded = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.named_parameters()}
    manifest = store.publish(PolicyVersion("run", 5), rounded)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(rounded[name])

    def make(root: Path) -> ModelSnapshots:
        return ModelSnapshots(SnapshotDirectory(root), tiny_model(0))

    fetched = FetchedSnapshots(store.fetch, make)
    snapshot = fetched.open(manifest)
    assert snapshot.version == manifest.version
    assert {entry.dtype for entry in snapshot.manifest.tensors} == {"float32"}, "as the model computes"
    loaded = Probe.of(load_any_model(snapshot.directory))
    np.testing.assert_allclose(loaded.logprobs, Probe.of(model).logprobs, atol=1e-5)
    np.testing.assert_allclose(snapshot.probe.logprobs, loaded.logprobs, atol=1e-5)
    fetched.close()
    assert not snapshot.directory.exists()


def test_a_disk_that_is_full_is_told_and_left_as_it_was(tmp_path: Path) -> None:
    model = tiny_model(0)
    snapshots = ModelSnapshots(SnapshotDirectory(tmp_path), model)
    with full_disk(), pytest.raises(StoreError, match="a snapshot cannot be written"):
        snapshots.publish(PolicyVersion("run", 1), dict(model.named_parameters()))
    assert list(tmp_path.iterdir()) == []


def tiny_glm() -> TransformersModel:
    return transformers_builders.tiny_model("glm4_moe")


@pytest.mark.parametrize(
    ("make", "targets", "is_beside"),
    [
        (lambda: tiny_model(0, "qwen3"), ("attention", "feed_forward"), True),
        (tiny_glm, ("q_proj", "o_proj"), False),
        (lambda: tiny_model(0), ("attention",), False),
    ],
    ids=["dense", "of transformers", "with experts"],
)
def test_adapters_lie_beside_their_base_where_vllm_serves_them_so(
    make: Callable[[], AnyModel], targets: tuple[str, ...], is_beside: bool, tmp_path: Path
) -> None:
    config = AdapterConfig(rank=4, targets=targets)
    model, adapters = adapted_model(make(), config, 1)
    weights = ModelSnapshots(SnapshotDirectory(tmp_path), make(), config)
    base = dict(model.named_parameters())
    first = open_snapshot(weights.publish(PolicyVersion("run", 0), {**base, **adapters.published()}))
    np.testing.assert_allclose(first.probe.logprobs, Probe.of(model).logprobs, atol=1e-4)
    assert (first.directory / ADAPTER).exists() == is_beside
    held = load_any_model(first.directory)
    pairs = zip(held.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs) == is_beside, "the sum otherwise"
    move_adapters(adapters)
    second = open_snapshot(weights.publish(PolicyVersion("run", 1), {**base, **adapters.published()}))
    np.testing.assert_allclose(second.probe.logprobs, Probe.of(model).logprobs, atol=1e-4)
    check_same_shapes(first.manifest, second.manifest)


def test_adapters_are_rounded_to_the_format_of_their_base_and_so_is_the_probe(tmp_path: Path) -> None:
    config = AdapterConfig(rank=4)

    def make() -> LanguageModel:
        return tiny_model(0, "qwen3").cast(torch.bfloat16)

    model, adapters = adapted_model(make(), config, 1)
    weights = ModelSnapshots(SnapshotDirectory(tmp_path), make(), config)
    tensors = {**dict(model.named_parameters()), **adapters.published()}
    snapshot = open_snapshot(weights.publish(PolicyVersion("run", 0), tensors))
    assert {entry.dtype for entry in snapshot.manifest.tensors} == {"bfloat16"}
    with torch.no_grad():
        for factor in adapters.parameters():
            factor.copy_(factor.bfloat16())
    np.testing.assert_allclose(snapshot.probe.logprobs, Probe.of(model).logprobs, atol=1e-5)


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    config = AdapterConfig(rank=4)
    manifests = []
    for seed in (0, 1):
        model, adapters = adapted_model(tiny_model(seed, "qwen3"), config, 1)
        weights = ModelSnapshots(SnapshotDirectory(tmp_path), tiny_model(seed, "qwen3"), config)
        tensors = {**dict(model.named_parameters()), **adapters.published()}
        manifests.append(weights.publish(PolicyVersion("run", seed), tensors))
    with pytest.raises(WeightUpdateError, match="the tensors differ from those"):
        check_same_shapes(*manifests)
