"""Where images come from."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from etude.config.base import Section


class ImagesConfig(Section):
    """Images of tasks that bring a machine of their own. See docs/images.md."""

    bases: dict[str, str] = Field(default_factory=dict[str, str])
    """Images by the names that tasks and Dockerfiles use: `"ubuntu:24.04" = "oci:DIR"`, an OCI layout,
    `oci-archive:FILE` or `docker-archive:FILE`; or another image in its place, by a name of `etude sandbox
    image list` or of a base that is made of Debian's packages: `"ubuntu:24.04" = "debian:bookworm"`. Nothing
    is fetched from a registry: a task whose image is neither here nor one of these is left out."""

    allow: list[str] = Field(default_factory=list[str])
    """Hosts that RUN of a task's Dockerfile may reach, by the proxy that `http_proxy` names: `host` (its port
    443), `host:port` or `*.domain:port`, such as `deb.debian.org:80` for apt. Empty: none."""
    allow_private: list[str] = Field(default_factory=list[str])
    """`IP:PORT` of servers that these hosts may be although their addresses are private, such as a package
    index of your own."""
    volumes: dict[str, Path] = Field(default_factory=dict[str, Path])
    """Files and directories of the host that RUN of a task's Dockerfile sees, read-only and in no layer:
    `INSIDE = "HOST"`, as in `"/etc/pip.conf" = "/etc/pip.conf"`."""

    @field_validator("bases")
    @classmethod
    def _bases_are_places(cls, value: dict[str, str]) -> dict[str, str]:
        for name, place in value.items():
            if not re.fullmatch(r"(oci|oci-archive|docker-archive):.+|[a-z0-9][a-z0-9._/:@-]*", place):
                known = "oci:DIR, oci-archive:FILE, docker-archive:FILE or the name of an image"
                raise ValueError(f"{name}: must be {known}, received {place!r}")
        return value
