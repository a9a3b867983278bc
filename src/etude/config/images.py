"""Sources of the images of tasks."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from etude.config.base import Section


class ImagesConfig(Section):
    """Images of tasks that have an image of their own. See docs/images.md."""

    bases: dict[str, str] = Field(default_factory=dict[str, str])
    """Images by the names that tasks and Dockerfiles use: `"ubuntu:24.04" = "oci:DIR"`, an OCI layout,
    `oci-archive:FILE` or `docker-archive:FILE`; or a substitute, by its name in `etude sandbox image list` or
    that of a base built from Debian's packages: `"ubuntu:24.04" = "debian:bookworm"`. Nothing is fetched from
    a registry: a task whose image is neither built nor listed here is left out."""

    allow: list[str] = Field(default_factory=list[str])
    """Hosts that RUN instructions of a task's Dockerfile may reach, through the proxy in `http_proxy`: `host`
    (port 443), `host:port` or `*.domain:port`, such as `deb.debian.org:80` for apt. Empty: none."""
    allow_private: list[str] = Field(default_factory=list[str])
    """`IP:PORT` of private addresses to which these hosts may resolve, such as that of your own package
    index."""
    volumes: dict[str, Path] = Field(default_factory=dict[str, Path])
    """Files and directories of the host that are mounted, read-only and in no layer, for RUN instructions of
    a task's Dockerfile: `INSIDE = "HOST"`, as in `"/etc/pip.conf" = "/etc/pip.conf"`."""

    @field_validator("bases")
    @classmethod
    def _bases_are_places(cls, value: dict[str, str]) -> dict[str, str]:
        for name, place in value.items():
            if not re.fullmatch(r"(oci|oci-archive|docker-archive):.+|[a-z0-9][a-z0-9._/:@-]*", place):
                known = "oci:DIR, oci-archive:FILE, docker-archive:FILE or the name of an image"
                raise ValueError(f"{name}: must be {known}, received {place!r}")
        return value
