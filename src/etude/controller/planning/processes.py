"""The processes of a run, and the engines that sample its sessions."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import ElasticConfig, RunConfig

_DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Processes:
    """Number of processes of each kind. Trainer and engine may be one process."""

    ranks: int
    """Ranks of the trainer."""
    engines: int
    """The run's own engines; 0 where it trains on recorded sessions."""
    evaluations: int
    """Evaluations during training, each with an engine."""
    workers: int
    elsewhere: int
    """Engines of other clusters."""
    borrowed: float
    """Borrowed replicas, on average over a day."""
    apart: bool
    """Whether trainer and engines have processes of their own."""
    on_one_machine: bool
    """Whether the run's own processes share the cores and memory of one machine."""

    @staticmethod
    def of(config: RunConfig, device: str) -> Processes:
        """The processes of a run that computes on `device`."""
        cluster, apart = config.cluster, config.executor == "ray"
        samples = not config.rl.stream.source
        own = cluster.engines if apart else 1
        return Processes(
            ranks=config.parallel.ranks,
            engines=own if samples else 0,
            evaluations=int(config.evaluation.every_steps > 0),
            workers=cluster.workers,
            elsewhere=config.plan.cluster_engines if config.clusters.listen else 0,
            borrowed=_lent_share(config.elastic) * config.elastic.most if config.elastic.router else 0.0,
            apart=apart,
            on_one_machine=device == "cpu" and not (apart and cluster.address),
        )

    @property
    def count(self) -> int:
        """Number of the run's own processes, including the one with the loop."""
        if not self.apart:
            return self.ranks
        return 1 + self.ranks + self.engines + self.evaluations + self.workers

    @property
    def devices(self) -> int:
        """Number of devices that are paid for: one per process that computes with the model, or one machine
        for all, and one per engine of another cluster."""
        own = self.ranks + (self.engines + self.evaluations if self.apart else 0)
        return (1 if self.on_one_machine else own) + self.elsewhere


def _lent_share(settings: ElasticConfig) -> float:
    """Share of a day in which replicas may be borrowed."""
    return sum(settings.open_at(60.0 * minute) for minute in range(_DAY_MINUTES)) / _DAY_MINUTES
