"""The GPU's paged attention, under Triton's interpreter, against plain arithmetic in float64."""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from etude.model.kernels.gpu import paged_attention as kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.3


def case(lengths, counts, heads=4, kv_heads=2, key_dim=32, value_dim=32, in_key=False, seed=0):
    """Sequences of `lengths`, of which the last `counts` rows are computed; pages lie in random order."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // kernel.PAGE_TOKENS) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=generator)
    tables = torch.zeros((len(lengths), max(needed)), dtype=torch.int32)
    for sequence, pages in enumerate(np.split(order[: sum(needed)], np.cumsum(needed)[:-1])):
        tables[sequence, : len(pages)] = pages
    keys = torch.randn((len(order), kv_heads, key_dim, kernel.PAGE_TOKENS), generator=generator)
    values = torch.randn((len(order), kv_heads, kernel.PAGE_TOKENS, value_dim), generator=generator)
    query = torch.randn((sum(counts), heads, key_dim), generator=generator)
    spans = [np.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    return query, keys, None if in_key else values, tables, torch.from_numpy(np.concatenate(spans)), counts


def attend(query, keys, values, tables, positions, counts, value_dim=32, rows_per_tile=8):
    tiles = kernel.Tiles.plan(np.array(counts), rows_per_tile, DEVICE)
    given = [None if x is None else x.to(DEVICE) for x in (query, keys, values, tables, positions)]
    return kernel.paged_attention(*given, tiles, SCALE, value_dim).cpu()


def expected(query, keys, values, tables, positions, counts, value_dim=32):
    sequence = np.repeat(np.arange(len(counts)), counts)
    group = query.shape[1] // keys.shape[1]
    out = torch.zeros((*query.shape[:2], value_dim), dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        pages = tables[sequence[row]].long()
        for head in range(query.shape[1]):
            strip = keys[pages, head // group].double().transpose(1, 2).reshape(-1, keys.shape[2])
            held = strip if values is None else values[pages, head // group].double().flatten(0, 1)
            shares = (strip[: position + 1] @ query[row, head].double() * SCALE).softmax(0)
            out[row, head] = shares @ held[: position + 1, :value_dim]
    return out


@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 40], [40, 1, 1]])
def test_rows_attend_to_their_own_past(counts):
    given = case([40, 17, 64], counts)
    assert torch.allclose(attend(*given).double(), expected(*given), atol=2e-5)


def test_a_compressed_cache_gives_values_out_of_its_keys():
    given = case([33, 70], [2, 1], heads=8, kv_heads=1, key_dim=48, in_key=True)
    assert torch.allclose(attend(*given).double(), expected(*given), atol=2e-5)


def test_splits_of_a_long_sequence_are_joined(monkeypatch):
    monkeypatch.setattr(kernel, "SPLIT_PAGES", 4)
    given = case([300, 64, 5], [3, 1, 5])
    assert torch.allclose(attend(*given).double(), expected(*given), atol=2e-5)


def test_bits_of_a_row_do_not_depend_on_its_neighbours(monkeypatch):
    monkeypatch.setattr(kernel, "SPLIT_PAGES", 4)
    query, keys, values, tables, positions, counts = case([150, 300, 64], [20, 3, 1])
    together = attend(query, keys, values, tables, positions, counts)
    alone = attend(query[:20], keys, values, tables[:1, :10], positions[:20], [20])
    assert torch.equal(together[:20], alone)
    one_by_one = [
        attend(query[row : row + 1], keys, values, tables[:1], positions[row : row + 1], [1])
        for row in range(20)
    ]
    if torch.cuda.is_available():
        assert torch.equal(together[:20], torch.cat(one_by_one))
    else:  # the interpreter's matrix product depends on where in a tile a row lies
        assert torch.allclose(together[:20], torch.cat(one_by_one), atol=1e-6)


def test_rows_that_only_fill_a_buffer_are_stored_nowhere_and_get_zeros():
    query, keys, values, tables, positions, _ = case([33, 20], [1, 1])
    tables, positions = tables[[0, 0, 1]], torch.tensor([32, -1, 19])
    key, value = torch.randn(3, 5, 32)[:, 1:3], torch.randn(3, 2, 32)
    sequence = torch.arange(3, dtype=torch.int32)
    before = keys.clone(), values.clone()
    given = [x.to(DEVICE) for x in (key, value, keys, values, tables, sequence, positions)]
    kernel.store_rows(*given)
    keys, values = given[2].cpu(), given[3].cpu()
    for row, position in ((0, 32), (2, 19)):
        page, place = int(tables[row, position // 16]), position % 16
        assert torch.equal(keys[page, :, :, place], key[row])
        assert torch.equal(values[page, :, place], value[row])
        before[0][page, :, :, place], before[1][page, :, place] = key[row], value[row]
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])
    out = attend(query[[0, 0, 1]], keys, values, tables, positions, [1, 1, 1], rows_per_tile=1)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    alone = attend(query, keys, values, tables[[0, 2]], positions[[0, 2]], [1, 1], rows_per_tile=1)
    assert torch.equal(out[[0, 2]], alone)


def test_more_query_heads_than_a_tile_holds_are_cut():
    given = case([37, 18], [2, 1], heads=40, kv_heads=2)
    assert torch.allclose(attend(*given, rows_per_tile=1).double(), expected(*given), atol=2e-5)


def test_tiles_stay_within_their_sequences():
    tiles = kernel.Tiles.plan(np.array([9, 1, 4, 8]), 4, torch.device("cpu"))
    assert tiles.sequence.tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert tiles.first_row.tolist() == [0, 4, 8, 9, 10, 14, 18]
    assert tiles.num_rows.tolist() == [4, 4, 1, 1, 4, 4, 4]


def test_key_widths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="powers of two"):
        attend(*case([5], [1], key_dim=44))
