"""Weight updates are atomic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.errors import WeightUpdateError
from etude.records import PolicyVersion, WeightManifest
from etude.weights import MemoryWeights, check_tensors, describe_tensors

_VERSION = PolicyVersion("run", 3)


def _tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "b": torch.randn((3, 4), generator=generator),
        "a": torch.randn(5, generator=generator),
        "half": torch.randn((2, 2), generator=generator).bfloat16(),
    }


def _manifest(tensors: dict[str, Tensor]) -> WeightManifest:
    return describe_tensors(_VERSION, tensors, "memory:x")


def test_a_manifest_names_every_tensor_and_digests_them_in_any_order() -> None:
    tensors = _tensors()
    manifest = _manifest(tensors)
    assert [(entry.name, entry.shape, entry.dtype) for entry in manifest.tensors] == [
        ("a", (5,), "float32"),
        ("b", (3, 4), "float32"),
        ("half", (2, 2), "bfloat16"),
    ]
    assert manifest.version.digest
    assert (manifest.version.lineage, manifest.version.step) == ("run", 3)
    assert _manifest(dict(reversed(tensors.items()))) == manifest
    check_tensors(manifest, tensors)


def test_layout_in_memory_does_not_matter_and_values_do() -> None:
    tensors = _tensors()
    manifest = _manifest(tensors)
    check_tensors(manifest, tensors | {"b": tensors["b"].t().contiguous().t()})
    negative_zero = tensors | {"a": torch.zeros(5)}
    with pytest.raises(WeightUpdateError):
        check_tensors(_manifest(negative_zero), negative_zero | {"a": -torch.zeros(5)})


@given(st.sampled_from(["a", "b", "half"]), st.integers(0, 10**6))
def test_one_flipped_bit_is_refused_with_the_tensors_name(name: str, bit: int) -> None:
    tensors = _tensors()
    manifest = _manifest(tensors)
    damaged = tensors[name].clone()
    data = damaged.view(torch.uint8).flatten()
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    with pytest.raises(WeightUpdateError) as caught:
        check_tensors(manifest, tensors | {name: damaged})
    assert caught.value.field == name
    assert caught.value.fix


@pytest.mark.parametrize("kind", ["missing", "extra", "renamed"])
def test_other_names_are_refused(kind: str) -> None:
    tensors = _tensors()
    manifest = _manifest(tensors)
    changed = dict(tensors)
    if kind in ("missing", "renamed"):
        del changed["b"]
    if kind in ("extra", "renamed"):
        changed["c"] = tensors["b"]
    with pytest.raises(WeightUpdateError) as caught:
        check_tensors(manifest, changed)
    assert caught.value.field == "tensors"
    assert caught.value.received == {"missing": ["b"], "extra": ["c"], "renamed": ["b", "c"]}[kind]


@pytest.mark.parametrize("change", [lambda b: b.reshape(4, 3), lambda b: b.view(torch.int32)])
def test_another_shape_or_type_of_the_same_bytes_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    tensors = _tensors()
    with pytest.raises(WeightUpdateError) as caught:
        check_tensors(_manifest(tensors), tensors | {"b": change(tensors["b"])})
    assert caught.value.field == "b"


def test_a_manifest_under_another_versions_digest_is_refused() -> None:
    tensors = _tensors()
    manifest = _manifest(tensors)
    forged = replace(manifest, version=_manifest(_tensors(1)).version)
    with pytest.raises(WeightUpdateError) as caught:
        check_tensors(forged, tensors)
    assert caught.value.field == "digest"


def test_publishing_copies_so_the_trainer_may_go_on() -> None:
    weights, tensors = MemoryWeights(), _tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    manifest = weights.publish(_VERSION, tensors)
    for tensor in tensors.values():
        tensor.add_(1)
    fetched = weights.fetch(manifest)
    for name, tensor in before.items():
        assert torch.equal(fetched[name], tensor)


def test_publishing_detaches_from_the_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    weights = MemoryWeights()
    fetched = weights.fetch(weights.publish(_VERSION, {"p": parameter}))
    assert not fetched["p"].requires_grad


def test_the_oldest_version_is_forgotten_and_says_so() -> None:
    weights = MemoryWeights(keep=2)
    manifests = [weights.publish(PolicyVersion("run", step), _tensors(step)) for step in range(3)]
    with pytest.raises(WeightUpdateError, match="no longer in memory"):
        weights.fetch(manifests[0])
    for step in (1, 2):
        assert torch.equal(weights.fetch(manifests[step])["a"], _tensors(step)["a"])


def test_a_version_published_again_with_other_weights_refuses_the_old_manifest() -> None:
    weights = MemoryWeights()
    old = weights.publish(_VERSION, _tensors(0))
    new = weights.publish(_VERSION, _tensors(1))
    with pytest.raises(WeightUpdateError):
        weights.fetch(old)
    weights.fetch(new)


def test_equal_weights_have_equal_digests_whatever_their_version() -> None:
    digests = {describe_tensors(PolicyVersion("x", step), _tensors(), "u").version.digest for step in (0, 9)}
    assert len(digests) == 1
    assert _manifest(_tensors(1)).version.digest not in digests
