"""Model of the time and bytes to distribute one weight update to four regions, from measured rates.

    python benchmarks/weights_global.py --measured benchmarks/results/weights.json [--json FILE]

Nothing is transferred: sizes and rates of the codec come from `benchmarks/weights.py`; links and machines are
assumptions, stored with the result. Encoding, upload, transfer to the regions, distribution within them and
application overlap shard by shard, so the slowest stage determines the time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from common import Figures, print_table, write_result


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured codec rates, in bytes of the whole model per second."""

    ratio: float
    encode_gb_per_s_core: float
    apply_gb_per_s_core: float


@dataclass(frozen=True, slots=True)
class Setting:
    """Inputs of the model; all but the first two are assumptions."""

    delta: Rates
    full: Rates
    model_tb: float = 1.0
    regions: int = 4
    replicas_per_region: int = 8
    long_link_gbit_per_s: float = 10.0
    """Rate from the store to one region, shared by all downloads there."""
    upload_gbit_per_s: float = 10.0
    local_link_gbit_per_s: float = 100.0
    """Total sending rate of the relay within a region."""
    trainer_cores: int = 32
    replica_cores: int = 16
    round_trip_s: float = 0.2
    round_trips: int = 6
    """Sequential round trips: the commit appears, is read, files are requested."""


def plan(setting: Setting, *, delta: bool, relays: bool) -> Figures:
    """Bytes over the long links, and seconds until the last replica has the version in host memory."""
    model_bytes = setting.model_tb * 1e12
    rates = setting.delta if delta else setting.full
    update_bytes = model_bytes / rates.ratio
    copies = 1 if relays else setting.replicas_per_region
    long_bytes = update_bytes * copies
    stages = {
        "encode_s": model_bytes / (rates.encode_gb_per_s_core * 1e9 * setting.trainer_cores),
        "upload_s": _link_s(update_bytes, setting.upload_gbit_per_s),
        "long_link_s": _link_s(long_bytes, setting.long_link_gbit_per_s),
        "local_link_s": _link_s(update_bytes * setting.replicas_per_region, setting.local_link_gbit_per_s),
        "apply_s": model_bytes / (rates.apply_gb_per_s_core * 1e9 * setting.replica_cores),
    }
    if not relays:
        del stages["local_link_s"]
    waiting_s = setting.round_trip_s * setting.round_trips
    return {
        "update_gb": update_bytes / 1e9,
        "long_link_gb_per_region": long_bytes / 1e9,
        "long_link_gb": long_bytes * setting.regions / 1e9,
        **stages,
        "total_s": max(stages.values()) + waiting_s,
        "total_without_overlap_s": sum(stages.values()) + waiting_s,
    }


def _link_s(num_bytes: float, gbit_per_s: float) -> float:
    return num_bytes * 8 / (gbit_per_s * 1e9)


def _rates(measured: dict[str, float]) -> Rates:
    return Rates(measured["ratio"], measured["encode_gb_per_s_core"], measured["apply_gb_per_s_core"])


def main() -> None:
    """Prints one table per distribution method and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--long-link-gbit-per-s", type=float, default=10.0)
    parser.add_argument("--replicas-per-region", type=int, default=8)
    arguments = parser.parse_args()
    measured = json.loads(arguments.measured.read_text(encoding="utf-8"))
    synthetic = measured["peers"]["lr_1e_6"]
    setting = Setting(
        delta=_rates(synthetic["etude"]),
        full=_rates(synthetic["etude_full"]),
        long_link_gbit_per_s=arguments.long_link_gbit_per_s,
        replicas_per_region=arguments.replicas_per_region,
    )
    ways = {
        "delta_with_relays": plan(setting, delta=True, relays=True),
        "delta_without_relays": plan(setting, delta=True, relays=False),
        "full_with_relays": plan(setting, delta=False, relays=True),
        "full_without_relays": plan(setting, delta=False, relays=False),
    }
    for name, values in ways.items():
        print_table(name.replace("_", " "), values)
    figures = {
        f"{figure}_{name}": values[figure]
        for name, values in ways.items()
        for figure in ("total_s", "long_link_gb")
    }
    if arguments.json:
        write_result(arguments.json, figures, {"setting": asdict(setting), **ways})


if __name__ == "__main__":
    main()
