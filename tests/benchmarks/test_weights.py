"""The weight update benchmark at small size: its bound holds, and relays save the expected traffic."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from weights_global import Rates, Setting, main, plan

import weights


def test_the_bound_is_the_entropy_of_positions_and_differences() -> None:
    base = torch.full((8,), 1.0).bfloat16()
    target = base.clone()
    target[0] = 2.0
    positions = 8 * (-(1 / 8) * math.log2(1 / 8) - (7 / 8) * math.log2(7 / 8))
    assert weights.bound_bytes(base, target) == pytest.approx(positions / 8)
    target[1] = 0.5
    positions = 8 * (-(2 / 8) * math.log2(2 / 8) - (6 / 8) * math.log2(6 / 8))
    assert weights.bound_bytes(base, target) == pytest.approx((positions + 2) / 8)


def test_ours_is_near_the_bound_and_ahead_of_xor() -> None:
    base, target = weights.generate(1 << 20, 1e-6)
    ours = weights.measure_ours(base, target, 1)
    peers = weights.measure_peers(base, target, 1)
    assert ours["entropy_share"] > 0.9
    assert ours["ratio"] > 2 * peers["xor_zstd_1"]["ratio"]
    assert ours["changed_share"] < 0.05


def test_a_relay_saves_the_long_link_as_many_copies_as_there_are_replicas() -> None:
    setting = Setting(Rates(200.0, 2.0, 3.0), Rates(1.5, 0.5, 0.5), replicas_per_region=8)
    with_relays, without = (plan(setting, delta=True, relays=relays) for relays in (True, False))
    assert without["long_link_gb"] == pytest.approx(8 * with_relays["long_link_gb"])
    assert with_relays["update_gb"] == pytest.approx(5.0)
    assert with_relays["long_link_s"] == pytest.approx(4.0)


def test_the_global_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"ratio": 200.0, "encode_gb_per_s_core": 2.0, "apply_gb_per_s_core": 3.0}
    measured = {"peers": {"lr_1e_6": {"etude": rates, "etude_full": rates | {"ratio": 1.5}}}}
    (tmp_path / "in.json").write_text(json.dumps(measured))
    arguments = ["x", "--measured", str(tmp_path / "in.json"), "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert figures["long_link_gb_full_with_relays"] > 100 * figures["long_link_gb_delta_with_relays"]
