"""Where images come from."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from etude.config.base import Section


class ImagesConfig(Section):
    """Images of tasks that bring a machine of their own. See docs/images.md."""

    bases: dict[str, str] = Field(default_factory=dict[str, str])
    """Images by the names that tasks and Dockerfiles use: `"ubuntu:24.04" = "oci:DIR"`, an OCI layout,
    `oci-archive:FILE` or `docker-archive:FILE`. Nothing is fetched from a registry: a task whose image is
    neither here, nor among those of `etude sandbox image list`, nor made of Debian's packages is left out."""

    @field_validator("bases")
    @classmethod
    def _bases_are_places(cls, value: dict[str, str]) -> dict[str, str]:
        for name, place in value.items():
            if not re.fullmatch(r"(oci|oci-archive|docker-archive):.+", place):
                known = "oci:DIR, oci-archive:FILE or docker-archive:FILE"
                raise ValueError(f"{name}: must be {known}, received {place!r}")
        return value
