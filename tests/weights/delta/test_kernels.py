"""Native and vectorised kernels write the same bytes, and refuse the same damage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.weights.delta.chunks import decode_chunk, encode_chunk
from etude.weights.delta.kernels import Coded
from etude.weights.delta.symbols import LAST_SYMBOL, NUM_SYMBOLS, least_of, symbols_of, widths_of
from etude.weights.delta.tables import (
    NUM_LEVELS,
    SCALE,
    Table,
    counted_table,
    gap_table,
    geometric_frequencies,
    read_table,
)
from etude.weights.delta.variable import Reader
from etude.weights.delta.words import layout_of
from tests.weights.delta.builders import DTYPES, all_kernels, as_tensor, byte_pairs, trained_pair

KERNELS = all_kernels()


def _words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().view(f"u{layout_of(tensor.dtype).size_bytes}")


@given(byte_pairs(), st.sampled_from(DTYPES), st.booleans())
def test_all_kernels_write_the_same_bytes_and_read_them(
    pair: tuple[bytes, bytes], dtype: torch.dtype, overwrite: bool
) -> None:
    layout = layout_of(dtype)
    base, target = (_words(as_tensor(data, dtype)) for data in pair)
    chunks = {
        name: encode_chunk(base, target, layout, own, overwrite=overwrite) for name, own in KERNELS.items()
    }
    assert len(set(chunks.values())) == 1
    for own in KERNELS.values():
        found = np.zeros_like(target)
        decode_chunk(memoryview(chunks["numpy"]), base, found, layout, own)
        assert np.array_equal(found, target)


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_they_agree_on_what_training_leaves(rate: float, dtype: torch.dtype) -> None:
    layout = layout_of(dtype)
    base, target = (_words(tensor) for tensor in trained_pair(70_001, rate, dtype=dtype))
    chunks = {encode_chunk(base, target, layout, own) for own in KERNELS.values()}
    assert len(chunks) == 1
    for own in KERNELS.values():
        found = np.zeros_like(target)
        decode_chunk(memoryview(next(iter(chunks))), base, found, layout, own)
        assert np.array_equal(found, target)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 4099])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_they_agree_where_whole_blocks_have_one_exponent(count: int, dtype: torch.dtype) -> None:
    layout = layout_of(dtype)
    generator = np.random.default_rng(count)
    base = _words(
        (1 + torch.rand(count)).to(dtype) if dtype.is_floating_point else torch.zeros(count, dtype=dtype)
    )
    for share in (0.02, 0.5, 1.0):
        moved = generator.random(count) < share
        steps = generator.choice([1, -1, 2, 127, -128, 300, -40_000], count)
        target = np.where(moved, base.astype(np.int64) + steps, base).astype(base.dtype)
        chunks = {encode_chunk(base, target, layout, own) for own in KERNELS.values()}
        assert len(chunks) == 1
        for own in KERNELS.values():
            found = base.copy()
            decode_chunk(memoryview(next(iter(chunks))), found, found, layout, own)
            assert np.array_equal(found, target)


@pytest.mark.parametrize("sizes", [(40_000,), (5, 33_333, 1, 17), (16_384, 16_384)])
@pytest.mark.parametrize("largest_bits", [2, 8, 32])
def test_they_code_values_of_any_width_alike(sizes: tuple[int, ...], largest_bits: int) -> None:
    generator = np.random.default_rng(sum(sizes))
    widths = generator.integers(0, largest_bits + 1, sum(sizes))
    values = (generator.integers(0, 1 << 32, sum(sizes)) >> (32 - widths)).astype(np.uint32)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    numpy = KERNELS["numpy"]
    tables = np.stack([counted_table(row).frequencies for row in numpy.count(values, starts)])
    coded = numpy.encode(values, starts, tables, 64)
    for own in KERNELS.values():
        ours = own.encode(values, starts, tables, 64)
        for part in ("states", "words", "bits"):
            assert np.array_equal(getattr(ours, part), getattr(coded, part)), part
        assert np.array_equal(own.decode(coded, starts, tables), values)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_a_symbol_and_its_bits_are_the_value(values: list[int]) -> None:
    array = np.array(values, np.uint32)
    symbols = symbols_of(array)
    rest = array.astype(np.int64) - least_of(symbols)
    assert (rest >= 0).all() and (rest < 1 << widths_of(symbols)).all()
    assert (symbols <= LAST_SYMBOL).all()


def test_symbols_begin_where_the_one_before_ends() -> None:
    symbols = np.arange(LAST_SYMBOL + 1)
    ends = least_of(symbols) + (1 << widths_of(symbols))
    assert (ends[:-1] == least_of(symbols[1:])).all() and ends[-1] == 1 << 32
    assert (symbols_of(least_of(symbols).astype(np.uint32)) == symbols).all()
    assert (symbols_of((ends - 1).astype(np.uint32)) == symbols).all()


@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), min_size=1, max_size=5),
    st.sampled_from([1, 2, 8, 64]),
)
@settings(deadline=None)
def test_coded_values_come_back_and_all_kernels_agree(lists: list[list[int]], lanes: int) -> None:
    values = np.concatenate([np.array(part, np.uint32) for part in lists])
    starts = np.cumsum([0, *map(len, lists)]).astype(np.int64)
    coded: list[bytes] = []
    for own in KERNELS.values():
        counts = own.count(values, starts)
        tables = np.stack([counted_table(row).frequencies for row in counts])
        one = own.encode(values, starts, tables, lanes)
        coded.append(one.states.tobytes() + one.words.tobytes() + one.bits.tobytes())
        assert np.array_equal(own.decode(one, starts, tables), values)
    assert len(set(coded)) == 1


@pytest.mark.parametrize("name", KERNELS)
@given(data=st.data())
def test_damaged_codes_never_crash(name: str, data: st.DataObject) -> None:
    """The frames' hashes keep these from the kernels; they are to be safe without."""
    kernels = KERNELS[name]
    base, target = (_words(tensor) for tensor in trained_pair(3000, 1e-4))
    layout = layout_of(torch.bfloat16)
    chunk = bytearray(encode_chunk(base, target, layout, kernels))
    for _ in range(data.draw(st.integers(1, 4))):
        chunk[data.draw(st.integers(0, len(chunk) - 1))] = data.draw(st.integers(0, 255))
    del chunk[data.draw(st.integers(1, len(chunk))) :]
    found = np.zeros_like(target)
    try:
        decode_chunk(memoryview(bytes(chunk)), base, found, layout, kernels)
    except ValueError:
        return


@pytest.mark.parametrize("name", KERNELS)
def test_codes_that_end_early_are_refused(name: str) -> None:
    kernels = KERNELS[name]
    values, starts = np.arange(200, dtype=np.uint32), np.array([0, 200])
    tables = counted_table(kernels.count(values, starts)[0]).frequencies[None]
    coded = kernels.encode(values, starts, tables, 2)
    states, words, bits = coded.states.copy(), coded.words.copy(), coded.bits.copy()
    for wrong in (
        Coded(states, words[:-1], bits), Coded(states, words, bits[:-1]),
        Coded(states, np.append(words, words[:1]), bits), Coded(states ^ 1, words, bits),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            kernels.decode(wrong, starts, tables)


@pytest.mark.parametrize("level", [0, 1, 7, 40, NUM_LEVELS - 1])
@pytest.mark.parametrize("last", [0, 1, 9, 60, LAST_SYMBOL])
def test_geometric_tables_are_whole(level: int, last: int) -> None:
    frequencies = geometric_frequencies(level, last)
    assert int(frequencies.sum()) == SCALE
    assert (frequencies[: last + 1] > 0).all() and not frequencies[last + 1 :].any()


def test_geometric_gaps_need_no_table_and_clusters_do() -> None:
    rng = np.random.default_rng(0)
    kernels, starts = KERNELS["numpy"], np.array([0, 5000])
    geometric = (rng.geometric(0.01, 5000) - 1).astype(np.uint32)
    clusters = np.where(rng.random(5000) < 0.9, 0, 5000).astype(np.uint32)
    assert gap_table(kernels.count(geometric, starts)[0]).level is not None
    assert gap_table(kernels.count(clusters, starts)[0]).level is None


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=LAST_SYMBOL + 1).filter(any))
def test_tables_survive_writing(counts: list[int]) -> None:
    padded = np.array(counts + [0] * (NUM_SYMBOLS - len(counts)), np.int64)
    table = counted_table(padded)
    assert int(table.frequencies.sum()) == SCALE
    assert ((table.frequencies > 0) == (padded > 0)).all()
    for each in (table, Table(geometric_frequencies(20, len(counts) - 1), 20)):
        assert (read_table(Reader(memoryview(each.pack()))).frequencies == each.frequencies).all()


@given(st.binary(max_size=40))
def test_nonsense_is_no_table(data: bytes) -> None:
    try:
        table = read_table(Reader(memoryview(data)))
    except ValueError:
        return
    assert int(table.frequencies.sum()) == SCALE
