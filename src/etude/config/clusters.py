"""Sessions in other clusters, which ask a run for them: the control API."""

from __future__ import annotations

from pydantic import Field, model_validator

from etude.config.base import Section
from etude.config.secrets import SecretSource


class ClustersConfig(Section):
    """Sessions in other clusters, which ask the run for them. See docs/clusters.md."""

    listen: str = ""
    """`HOST:PORT` of the control API, at which `etude sample` asks for sessions; empty: all sessions run
    here. An address that others reach needs `token`."""
    token: SecretSource = ""
    """Where the control API's token is: `file:PATH` or `env:NAME`. Empty: none, on a loopback address."""
    certificate: str = ""
    """PEM file of a certificate for the control API. Without one its token crosses the network in the clear,
    unless a reverse proxy does TLS."""
    certificate_key: str = ""
    """PEM file of the certificate's key."""
    local_sessions: int = Field(default=0, ge=0)
    """So many sessions at once run here, on the run's own engine; the others wait for a cluster."""
    max_version_lag: int = Field(default=0, ge=0)
    """A session is given to clusters whose weights are at most so many versions behind those that were in
    service when its group began. What lags behind counts against `rl.max_staleness`."""
    lease_s: float = Field(default=30.0, gt=0)
    """A session whose cluster has not been heard of for so long is given to another. Clusters say four times
    as often that they live."""
    poll_s: float = Field(default=20.0, ge=0)
    """How long a cluster's question for sessions waits where there is none to give."""
    max_gives: int = Field(default=6, ge=1)
    """Times that a session is given away. What failed or was lost each time is reported as a failure of the
    infrastructure, and left out of its group."""
    patience_s: float = Field(default=900.0, gt=0)
    """The run ends, resumable, when sessions have waited so long without any cluster being there that new
    weights reach."""
    max_result_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Largest session that is taken, its expert routes included, packed and unpacked."""
    trajectories_url: str = ""
    """Where clusters put finished sessions: a directory or a URL that fsspec knows, such as
    `s3://bucket/run`, from which the run takes them. Empty: they are sent to the control API itself."""

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
