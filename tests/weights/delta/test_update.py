"""Any two sets of tensors: the update gives the second of the first, or refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.errors import WeightUpdateError
from etude.records import PolicyVersion
from etude.weights import describe_tensors
from etude.weights.delta import apply_update, encode_update, read_update_manifest, write_update
from etude.weights.delta.chunks import CHUNK_WORDS
from tests.weights.delta.builders import DTYPES, as_tensor, byte_pairs, same_bits, trained_pair

_BASE, _NEXT = PolicyVersion("run", 3), PolicyVersion("run", 4)


def _model(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    pairs = {
        "wide": tuple(part.view(40, 500) for part in trained_pair(20_000, 1e-5, seed)),
        "narrow": trained_pair(7, 1e-3, seed),
        "float": trained_pair(900, 1e-4, seed, torch.float32),
        "frozen": (torch.ones(30), torch.ones(30)),
        "scalar": (torch.tensor(1.0), torch.tensor(2.0)),
        "empty": (torch.empty(0, 3), torch.empty(0, 3)),
    }
    base = {name: before for name, (before, _) in pairs.items()}
    return base, {name: after for name, (_, after) in pairs.items()}


def _assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert same_bits(found[name], tensor), name


@pytest.mark.parametrize("overwrite", [False, True])
@given(pair=byte_pairs(), dtype=st.sampled_from(DTYPES))
def test_any_bytes_of_any_type_come_back(
    overwrite: bool, pair: tuple[bytes, bytes], dtype: torch.dtype
) -> None:
    base, target = ({"x": as_tensor(data, dtype)} for data in pair)
    update = encode_update(base, target, overwrite=overwrite)
    _assert_same(apply_update(base, update), target)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_model_comes_back_and_the_base_stays_as_it_was(workers: int, overwrite: bool) -> None:
    base, target = _model()
    before = {name: tensor.clone() for name, tensor in base.items()}
    update = encode_update(base, target, overwrite=overwrite, workers=workers)
    _assert_same(apply_update(base, update, workers=workers), target)
    _assert_same(dict(sorted(base.items())), before)


def test_the_order_of_workers_does_not_show() -> None:
    base, target = _model()
    assert encode_update(base, target, workers=3) == encode_update(base, target)


def test_without_a_base_it_is_a_full_snapshot() -> None:
    _, target = _model()
    update = encode_update(None, target, version=_NEXT)
    manifest = read_update_manifest(update)
    assert manifest.base is None
    _assert_same(apply_update(None, update), target)
    _assert_same(apply_update(_model(5)[0], update), target)


def test_both_versions_are_named_with_their_digests() -> None:
    base, target = _model()
    manifest = read_update_manifest(encode_update(base, target, version=_NEXT, base_version=_BASE))
    assert manifest.version == describe_tensors(_NEXT, target, "").version
    assert manifest.base == describe_tensors(_BASE, base, "").version


def test_a_known_digest_of_the_base_gives_the_same_update() -> None:
    base, target = _model()
    known = describe_tensors(_BASE, base, "").version
    assert encode_update(base, target, base_version=known) == encode_update(base, target, base_version=_BASE)


def test_tensors_may_come_go_and_change_shape_or_type() -> None:
    base, target = _model()
    del target["narrow"]
    target["new"] = torch.arange(10)
    target["float"] = target["float"].view(30, 30)
    target["wide"] = target["wide"].float()
    _assert_same(apply_update(base, encode_update(base, target)), target)


def test_small_steps_make_small_updates() -> None:
    base, target = trained_pair(200_000)
    update = encode_update({"x": base}, {"x": target})
    assert len(update) * 100 < base.nbytes
    assert len(encode_update({"x": base}, {"x": target}, overwrite=True)) * 30 < base.nbytes


@pytest.mark.parametrize("overwrite", [False, True])
def test_tensors_longer_than_a_chunk_come_back(overwrite: bool) -> None:
    base = {"x": torch.zeros(2 * CHUNK_WORDS + 5, dtype=torch.uint8)}
    target = {"x": base["x"].clone()}
    for at in (0, CHUNK_WORDS - 1, CHUNK_WORDS, 2 * CHUNK_WORDS, 2 * CHUNK_WORDS + 4):
        target["x"][at] = 7
    _assert_same(apply_update(base, encode_update(base, target, overwrite=overwrite)), target)


def test_what_is_written_tensor_by_tensor_is_what_is_returned(tmp_path) -> None:
    base, target = _model()
    with (tmp_path / "update").open("wb") as file:
        manifest = write_update(file, base, target, version=_NEXT)
    data = (tmp_path / "update").read_bytes()
    assert data == encode_update(base, target, version=_NEXT)
    assert manifest == read_update_manifest(data)


def test_buffers_are_filled_where_they_fit() -> None:
    base, target = _model()
    out = {name: torch.zeros_like(tensor) for name, tensor in target.items()}
    out["narrow"] = torch.zeros(3)
    found = apply_update(base, encode_update(base, target), out=out)
    _assert_same(found, target)
    assert found["wide"].data_ptr() == out["wide"].data_ptr()
    assert found["narrow"].data_ptr() != out["narrow"].data_ptr()


@pytest.mark.parametrize("overwrite", [False, True])
def test_in_place_is_the_same(overwrite: bool) -> None:
    base, target = _model()
    update = encode_update(base, target, overwrite=overwrite)
    _assert_same(apply_update(base, update, out=base), target)


def test_an_overwriting_update_may_be_applied_twice_and_half_and_again() -> None:
    base, target = _model()
    update = encode_update(base, target, overwrite=True)
    _assert_same(apply_update(target, update), target)
    half = base | {"wide": target["wide"]}
    mixed = torch.where(torch.arange(900) < 450, target["float"], base["float"])
    _assert_same(apply_update(half | {"float": mixed}, update), target)


@pytest.mark.parametrize("name", ["wide", "narrow", "float", "frozen"])
def test_another_base_is_refused_as_such(name: str) -> None:
    base, target = _model()
    update = encode_update(base, target, version=_NEXT, base_version=_BASE)
    other = base | {name: base[name] + 1}
    with pytest.raises(WeightUpdateError) as caught:
        apply_update(other, update)
    assert caught.value.field == "base"
    assert caught.value.fix


@pytest.mark.parametrize("base", [None, {}])
def test_no_base_at_all_is_refused_as_such(base: dict[str, Tensor] | None) -> None:
    update = encode_update(*_model())
    with pytest.raises(WeightUpdateError, match="these weights differ"):
        apply_update(base, update)


def test_every_flipped_bit_is_refused() -> None:
    base, target = ({"x": tensor} for tensor in trained_pair(600, 1e-4))
    update = encode_update(base, target)
    for at in range(len(update)):
        damaged = bytearray(update)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(WeightUpdateError):
            apply_update(base, bytes(damaged))


@given(st.integers(0, 10**6), st.binary(max_size=8))
@settings(deadline=None)
def test_a_cut_or_lengthened_update_is_refused(at: int, more: bytes) -> None:
    base, target = ({"x": tensor} for tensor in trained_pair(600, 1e-4))
    update = encode_update(base, target)
    at %= len(update)
    for wrong in (update[:at], update[:at] + more + update[at:], update[at:] + update[:at]):
        if wrong != update:
            with pytest.raises(WeightUpdateError):
                apply_update(base, wrong)


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    for wrong in (data, b"ETUDEWU1" + data + b"ETUDEEND"):
        with pytest.raises(WeightUpdateError):
            apply_update(None, wrong)
