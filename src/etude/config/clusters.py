"""The control API, from which other clusters request a run's sessions."""

from __future__ import annotations

from pydantic import Field, model_validator

from etude.config.base import SecretSource, Section


class ClustersConfig(Section):
    """Sessions that run in other clusters, which request them from this run. See docs/clusters.md."""

    listen: str = ""
    """`HOST:PORT` of the control API, from which `etude sample` requests sessions. Empty: all sessions run
    here. An address other than loopback needs `token`."""
    token: SecretSource = ""
    """Source of the control API's token: `file:PATH` or `env:NAME`. Empty: no token, on a loopback address
    only."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Host names by which clusters reach the control API, besides the address in `listen`. Requests by other
    names are refused."""
    certificate: str = ""
    """PEM file of a TLS certificate for the control API. Without one the token crosses the network
    unencrypted, unless a reverse proxy adds TLS."""
    certificate_key: str = ""
    """PEM file with the certificate's key."""
    local_sessions: int = Field(default=0, ge=0)
    """Number of sessions that run here at the same time, on the run's own engine. The others wait for a
    cluster."""
    max_version_lag: int = Field(default=0, ge=0)
    """Largest number of versions by which a cluster's weights may be behind those that were in service when a
    group started. The lag counts against `rl.max_staleness`."""
    lease_s: float = Field(default=30.0, gt=0)
    """Seconds without a message from a cluster after which its sessions are given to another. Clusters report
    four times as often."""
    poll_s: float = Field(default=20.0, ge=0)
    """Seconds that a cluster's request for sessions waits if there is none to give."""
    max_gives: int = Field(default=6, ge=1)
    """Number of times that a session is given to a cluster. A session that failed or was lost each time is
    reported as an infrastructure failure and left out of its group."""
    patience_s: float = Field(default=900.0, gt=0)
    """Seconds that sessions may wait without a cluster that new weights reach. The run then ends,
    resumable."""
    max_result_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Size limit of one session with its expert routes, packed and unpacked."""
    trajectories_url: str = ""
    """Where clusters put finished sessions for the run to read: a directory or a URL that fsspec supports,
    such as `s3://bucket/run`. Empty: they are sent to the control API."""

    @model_validator(mode="after")
    def _fits_together(self) -> ClustersConfig:
        host, colon, port = self.listen.rpartition(":")
        if self.listen and not (host and colon and port.isdigit() and int(port) < 1 << 16):
            raise ValueError(f"listen: must be HOST:PORT, received {self.listen!r}")
        if self.certificate_key and not self.certificate:
            raise ValueError(f"certificate: is missing, with certificate_key={self.certificate_key!r}")
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        host, _, port = self.listen.rpartition(":")
        return host, int(port)
