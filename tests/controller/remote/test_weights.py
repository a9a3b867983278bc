from pathlib import Path

import pytest
import torch

from etude.controller.remote.weights import DirectoryWeights
from etude.errors import StoreError, WeightUpdateError
from etude.kit.durable import DRAFTS
from etude.records import PolicyVersion
from tests.fakes.disk import full_disk


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), value), "b": torch.arange(4).float() + value}


def test_what_was_published_is_fetched_bit_for_bit_by_another_reader(tmp_path: Path) -> None:
    manifest = DirectoryWeights(tmp_path / "w").publish(PolicyVersion("run", 1), tensors(0.5))
    found = DirectoryWeights(tmp_path / "w").fetch(manifest)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in tensors(0.5).items()
    }
    assert manifest.version.digest


def test_a_version_that_is_published_again_stays_and_has_the_same_name(tmp_path: Path) -> None:
    weights = DirectoryWeights(tmp_path)
    first = weights.publish(PolicyVersion("run", 1), tensors(1.0))
    directory = Path(first.url.removeprefix("file://"))
    before = directory.stat().st_ino
    assert weights.publish(PolicyVersion("run", 1), tensors(1.0)) == first
    assert directory.stat().st_ino == before
    assert weights.publish(PolicyVersion("run", 1), tensors(2.0)).url != first.url


def test_a_version_that_a_machine_left_torn_is_written_anew(tmp_path: Path) -> None:
    weights = DirectoryWeights(tmp_path)
    manifest = weights.publish(PolicyVersion("run", 1), tensors(1.0))
    (Path(manifest.url.removeprefix("file://")) / "model.safetensors").write_bytes(b"")
    assert weights.publish(PolicyVersion("run", 1), tensors(1.0)) == manifest
    assert weights.fetch(manifest)["b"].tolist() == tensors(1.0)["b"].tolist()


def test_old_versions_and_what_a_killed_writer_left_are_deleted(tmp_path: Path) -> None:
    weights = DirectoryWeights(tmp_path, keep=3)
    (tmp_path / f"{DRAFTS}killed").mkdir()
    manifests = [weights.publish(PolicyVersion("run", step), tensors(float(step))) for step in range(5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        Path(manifest.url).name for manifest in manifests[-3:]
    )
    with pytest.raises(WeightUpdateError, match=r"cannot be read.*weights_directory"):
        weights.fetch(manifests[0])


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    weights = DirectoryWeights(tmp_path)
    manifest = weights.publish(PolicyVersion("run", 1), tensors(1.0))
    file = Path(manifest.url.removeprefix("file://")) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightUpdateError, match="differs from the manifest"):
        weights.fetch(manifest)


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"weights_directory.*cannot be written"):
        DirectoryWeights(tmp_path / "file").publish(PolicyVersion("run", 1), tensors(1.0))


def test_a_disk_that_is_full_is_told_and_left_as_it_was(tmp_path: Path) -> None:
    weights = DirectoryWeights(tmp_path)
    with full_disk(), pytest.raises(StoreError, match=r"weights_directory.*cannot be written.*too large"):
        weights.publish(PolicyVersion("run", 1), {"a": torch.zeros(100_000)})
    assert list(tmp_path.iterdir()) == []
    manifest = weights.publish(PolicyVersion("run", 1), {"a": torch.zeros(100_000)})
    assert not weights.fetch(manifest)["a"].any()
