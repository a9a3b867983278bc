"""A run over several clusters in network namespaces: shaped links, latency, loss, an outage, a kill -9.

python benchmarks/clusters.py [--config FILE --checkpoint DIR [--set KEY=VALUE]...] [--steps N] [--mbit M]
                              [--delay-ms D] [--loss P] [--outage-s S] [--json FILE]

First one cluster trains and two sample, with disturbances; then one samples, undisturbed. Needs root and the
programs ip, nsenter and tc. All clusters share this machine's processors: this measures that nothing is lost
or repeated and how many bytes cross the links, not the throughput of several machines.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
from benchmarks.common import Figures, write_result
from tests.controller.clusters.namespaces import Cluster, Wan, missing, wan
from tests.controller.clusters.running import Audit, audit, config, make_token, sample_options, wait_for
from tests.controller.learning import CONFIG
from tests.controller.running import num_rl_steps

from etude.config import RunConfig, dump_config, load_config
from etude.observe import RunDirectory, read_metrics
from etude.weights import WeightStore

CONTROL_PORT, STORE_PORT, RELAY_PORT = 8680, 8670, 8671
RUN_S = 540.0
"""Time limit of one run."""


@dataclass(frozen=True, slots=True)
class Link:
    """A wide-area link, the same in both directions."""

    mbit_per_s: float = 20.0
    delay_ms: float = 40.0
    """One-way delay."""
    loss: float = 0.01
    """Probability that a segment is lost."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model to train and the configuration of the run."""

    base: RunConfig = CONFIG
    checkpoint: Path | None = None
    """Initial weights; None: a small model, trained for this purpose and cached."""


@dataclass(frozen=True, slots=True)
class Disturbances:
    """The disturbances of a run with two sampling clusters."""

    outage_s: float = 6.0
    """Duration for which the first cluster's link is down, after the first step."""
    away_s: float = 3.0
    """Time between the second cluster's kill -9, one step later, and its restart."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Audit and measurements of a finished run."""

    audit: Audit
    wall_s: float
    """Wall time of the RL stage."""
    counts: dict[str, float]
    """Final counts of the control API."""
    weights_bytes: list[float]
    """Bytes that each cluster's relay fetched over its link: a full snapshot and the updates after it."""
    link_bytes: list[tuple[int, int]]
    """(to, from) each cluster: all bytes that crossed its link."""
    versions: int
    delta_bytes: float
    """Size of an update, median."""
    full_bytes: float
    """Size of a full snapshot, compressed."""
    tensor_bytes: float
    """Size of the model in its published number format."""

    @property
    def sessions_per_s(self) -> float:
        return self.audit.sessions / self.wall_s


class Run:
    """One run over a wide area network."""

    def __init__(self, net: Wan, link: Link, num_steps: int, model: Model) -> None:
        self._net, self._link = net, link
        self._token = make_token(net.directory / "token")
        listen = f"{net.training.address}:{CONTROL_PORT}"
        rl = {**model.base.model_dump(mode="json")["rl"], **_RL, "num_steps": num_steps}
        self.config = config(net.directory, listen, self._token, model.checkpoint, model.base, rl=rl)
        self._store = Path(self.config.weights.url)
        self._store.mkdir()
        self._relay_bytes: list[float] = [0.0] * len(net.others)

    def play(self, disturbances: Disturbances | None) -> RunResult:
        """Starts all processes, applies the disturbances, and waits for the end of the run."""
        net = self._net
        self._begin_relay(net.training, str(self._store), STORE_PORT)
        file = net.directory / "run.toml"
        file.write_text(dump_config(self.config))
        training = net.training.etude("train", "train", "--config", str(file))
        samplers = [self._join(number, cluster) for number, cluster in enumerate(net.others)]
        before = [cluster.link_bytes() for cluster in net.others]
        if disturbances is not None:
            self._disturb(disturbances, training, samplers)
        end_s = time.monotonic() + RUN_S
        while training.poll() is None:
            assert time.monotonic() < end_s, net.training.log("train").read_text()
            self._read_relays()
            time.sleep(0.5)
        assert training.returncode == 0, net.training.log("train").read_text()
        crossed = [_less(c.link_bytes(), b) for c, b in zip(net.others, before, strict=True)]
        return self._result(crossed)

    def _begin_relay(self, cluster: Cluster, store: str, port: int) -> None:
        host = cluster.address if cluster is self._net.training else "127.0.0.1"
        token = f"file:{self._token}"
        options = ["--host", host, "--port", str(port), "--token", token, "--store-token", token]
        options += ["--cache", str(cluster.directory / "cache")]
        process = cluster.etude("relay", "relay", store, *options)
        wait_for(cluster.log("relay"), "ready at", process)

    def _join(self, number: int, cluster: Cluster) -> Any:
        """Starts a cluster: the far end of the long link, a relay behind it, and `etude sample`."""
        training, link = self._net.training.address, self._link
        shaping = ["--delay-ms", f"{link.delay_ms:g}", "--loss", f"{link.loss:g}", "--seed", str(number)]
        ways = [f"{port}:{training}:{port}" for port in (CONTROL_PORT, STORE_PORT)]
        module = "tests.controller.clusters.long_link"
        cluster.start("link", sys.executable, "-m", module, *shaping, *ways)
        self._begin_relay(cluster, f"http://127.0.0.1:{STORE_PORT}", RELAY_PORT)
        return self._sample(cluster)

    def _sample(self, cluster: Cluster) -> Any:
        control, relay = (f"http://127.0.0.1:{port}" for port in (CONTROL_PORT, RELAY_PORT))
        return cluster.etude("sample", *sample_options(control, relay, self._token, cluster.name))

    def _disturb(self, disturbances: Disturbances, training: Any, samplers: list[Any]) -> None:
        self._wait_for_steps(training, 1)
        first, second = self._net.others
        first.cut_link()
        time.sleep(disturbances.outage_s)
        first.restore_link()
        self._wait_for_steps(training, 2)
        samplers[1].send_signal(signal.SIGKILL)
        samplers[1].wait()
        time.sleep(disturbances.away_s)
        self._sample(second)

    def _wait_for_steps(self, training: Any, steps: int) -> None:
        end_s = time.monotonic() + RUN_S
        while num_rl_steps(self.config) < steps:
            log = self._net.training.log("train")
            assert training.poll() is None and time.monotonic() < end_s, log.read_text()
            self._read_relays()
            time.sleep(0.2)

    def _read_relays(self) -> None:
        """Records the bytes that each relay has fetched: the counters end with their process."""
        headers = {"authorization": f"Bearer {self._token.read_text().strip()}"}

        def ask() -> float:
            url = f"http://127.0.0.1:{RELAY_PORT}/metrics"
            for line in httpx.get(url, headers=headers, timeout=20.0, trust_env=False).text.splitlines():
                if line.startswith("etude_weight_relay_fetched_bytes_total"):
                    return float(line.split()[1])
            raise AssertionError("the relay counts nothing")

        for number, cluster in enumerate(self._net.others):
            self._relay_bytes[number] = cluster.run(ask)

    def _result(self, crossed: list[tuple[int, int]]) -> RunResult:
        run = RunDirectory.open(self._net.directory / self.config.name)
        rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "clusters"]
        commits = WeightStore.open(str(self._store)).commits().values()
        deltas = [sum(file.size_bytes for file in commit.delta) for commit in commits if commit.delta]
        fulls = [sum(file.size_bytes for file in commit.full) for commit in commits if commit.full]
        final = run.checkpoints / "final" / "model.safetensors"
        stages = json.loads(run.report_file.read_text())["stages"]
        counts = {name: value for name, value in rows[-1].items() if isinstance(value, float)}
        return RunResult(
            audit(run),
            stages["rl_s"],
            counts,
            list(self._relay_bytes),
            crossed,
            len({row["step"] for row in rows}),
            float(statistics.median(deltas)),
            float(statistics.median(fulls)),
            final.stat().st_size / 2,  # float32 there, bfloat16 as published
        )


_RL: dict[str, Any] = {
    "groups_per_step": 4,
    "group_size": 4,
    "level_weights": [1.0, 0.0, 0.0],
    "max_staleness": 2,
}


def _less(now: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return now[0] - before[0], now[1] - before[1]


def play(
    num_clusters: int, link: Link, num_steps: int, disturbances: Disturbances | None, model: Model
) -> RunResult:
    """Plays a run over `num_clusters` sampling clusters to its end."""
    with wan(num_clusters, link.mbit_per_s) as net:
        return Run(net, link, num_steps, model).play(disturbances)


def figures_of(played: RunResult, name: str) -> Figures:
    """One run's figures, with `name` as suffix of their names."""
    found = played.audit
    to_clusters, from_clusters = (sum(one) for one in zip(*played.link_bytes, strict=True))
    values = {
        "steps": float(found.steps),
        "prompts": float(found.prompts),
        "prompts_lost": float(found.lost),
        "sessions_repeated": float(found.repeated),
        "sessions": float(found.sessions),
        "wall_s": played.wall_s,
        "sessions_per_s": played.sessions_per_s,
        "max_version_lag": found.max_lag,
        "weight_bytes_per_link": statistics.mean(played.weights_bytes),
        "weight_bytes_per_link_and_update": statistics.mean(
            (fetched - played.full_bytes) / (played.versions - 1) for fetched in played.weights_bytes
        ),
        "link_bytes_to_clusters": float(to_clusters),
        "link_bytes_from_clusters": float(from_clusters),
        "session_bytes": played.counts["received_bytes"] / max(1.0, played.counts["kept"]),
        **{key: played.counts[key] for key in ("given", "kept", "repeated", "late", "lapsed", "damaged")},
    }
    return {f"{key}_{name}": value for key, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--config", type=Path, help="with --checkpoint; else a small model of the tests")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--mbit", type=float, default=Link().mbit_per_s)
    parser.add_argument("--delay-ms", type=float, default=Link().delay_ms)
    parser.add_argument("--loss", type=float, default=Link().loss)
    parser.add_argument("--outage-s", type=float, default=Disturbances().outage_s)
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        raise SystemExit(f"cannot measure: {reason}")
    link = Link(arguments.mbit, arguments.delay_ms, arguments.loss)
    disturbances = Disturbances(arguments.outage_s)
    base = load_config(arguments.config, arguments.settings) if arguments.config is not None else CONFIG
    model = Model(base, arguments.checkpoint)
    disturbed = play(2, link, arguments.steps, disturbances, model)
    alone = play(1, link, arguments.steps, None, model)
    figures = {
        **figures_of(disturbed, "two_clusters_disturbed"),
        **figures_of(alone, "one_cluster"),
        "delta_bytes": disturbed.delta_bytes,
        "full_snapshot_bytes": disturbed.full_bytes,
        "model_bytes": disturbed.tensor_bytes,
    }
    for name, value in figures.items():
        print(f"  {name:52s} {value:14,.6g}")
    if arguments.json:
        settings = {
            "link": asdict(link),
            "trouble": asdict(disturbances),
            "learning_rate": base.rl.optimizer.learning_rate,
            "sessions_by_cluster": disturbed.audit.by_cluster,
            "weight_bytes_by_link": disturbed.weights_bytes,
            "link_bytes_by_link": disturbed.link_bytes,
        }
        write_result(arguments.json, figures, settings)
    wrong = [
        name for name, value in figures.items() if ("lost" in name or "sessions_repeated" in name) and value
    ]
    if wrong:
        raise SystemExit(f"failed: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
