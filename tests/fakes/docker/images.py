"""The images of the fake engine: directories with a configuration, under names."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import etude
from tests.fakes.docker.chamber import PATH

_ROOTS = os.pathsep.join(
    str(Path(file).resolve().parents[n]) for file, n in ((__file__, 3), (etude.__file__, 1))
)
_LAUNCH = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from tests.fakes.docker.chamber import main
main(sys.argv[2:])
"""
_RUN_S = 60.0


def chamber_command(root: Path, hostname: str, argv: list[str]) -> list[str]:
    """The command line that runs `argv` in a chamber."""
    return [sys.executable, "-I", "-S", "-B", "-c", _LAUNCH, _ROOTS, str(root), hostname, *argv]


@dataclass
class FakeImage:
    """One image: its files lie in `root`."""

    id: str
    root: Path
    config: dict[str, Any] = field(default_factory=dict)


class BuildError(Exception):
    """A Dockerfile that does not build."""


class FakeImages:
    """Images below a directory. `names` maps `repository:tag` to an id."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names: dict[str, str] = {}
        self.by_id: dict[str, FakeImage] = {}

    def add(self, name: str, config: dict[str, Any] | None = None, source: Path | None = None) -> FakeImage:
        """A new image under a name, with a copy of the files of `source`; the host's programs are in all."""
        digest = hashlib.sha256(secrets.token_bytes(16)).hexdigest()
        root = self.directory / digest
        if source is None:
            root.mkdir(parents=True)
        else:
            copy_tree(source, root)
        image = FakeImage(f"sha256:{digest}", root, {"Env": [f"PATH={PATH}"], **(config or {})})
        self.by_id[image.id] = image
        self.names[full_name(name)] = image.id
        return image

    def find(self, reference: str) -> FakeImage | None:
        """By name, by id or by the beginning of an id."""
        known = self.names.get(full_name(reference))
        if known is not None:
            return self.by_id[known]
        wanted = reference.removeprefix("sha256:")
        matches = [
            image for key, image in self.by_id.items() if key.removeprefix("sha256:").startswith(wanted)
        ]
        return matches[0] if len(matches) == 1 and len(wanted) >= 6 else None

    def names_of(self, image: FakeImage) -> list[str]:
        """All names of an image."""
        return sorted(name for name, key in self.names.items() if key == image.id)

    def remove(self, reference: str) -> list[dict[str, str]]:
        """Takes the name away, and the image with its last one: what `DELETE /images/...` answers."""
        image = self.find(reference)
        assert image is not None, "the caller has looked"
        doomed = [full_name(reference)] if full_name(reference) in self.names else self.names_of(image)
        rows = [{"Untagged": name} for name in doomed]
        for name in doomed:
            del self.names[name]
        if not self.names_of(image):
            del self.by_id[image.id]
            shutil.rmtree(image.root, ignore_errors=True)
            rows.append({"Deleted": image.id})
        return rows

    def describe(self, image: FakeImage) -> dict[str, Any]:
        """What `GET /images/{name}/json` answers."""
        return {
            "Id": image.id,
            "RepoTags": self.names_of(image),
            "Config": image.config,
            "Architecture": "amd64",
            "Os": "linux",
            "Size": 0,
            "RootFS": {"Type": "layers", "Layers": [image.id]},
        }

    def save(self, image: FakeImage) -> bytes:
        """The image as `docker save` writes it: a manifest, a configuration and one layer."""
        config = json.dumps({"config": image.config, "id": image.id}).encode()
        manifest = [{"Config": "config.json", "RepoTags": self.names_of(image), "Layers": ["layer.tar"]}]
        parts = {
            "manifest.json": json.dumps(manifest).encode(),
            "config.json": config,
            "layer.tar": pack_tree(image.root),
        }
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, data in parts.items():
                row = tarfile.TarInfo(name)
                row.size = len(data)
                archive.addfile(row, io.BytesIO(data))
        return buffer.getvalue()

    def load(self, data: bytes) -> list[str]:
        """Takes in what `save` wrote: the names. Raises BuildError."""
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                parts = {row.name: archive.extractfile(row).read() for row in archive}  # type: ignore[union-attr]
            row = json.loads(parts["manifest.json"])[0]
            config = json.loads(parts[row["Config"]])
        except (tarfile.TarError, KeyError, ValueError, AttributeError, IndexError) as error:
            raise BuildError(f"invalid archive: {error}") from error
        known = self.by_id.get(config["id"])
        if known is None:
            root = self.directory / config["id"].removeprefix("sha256:")
            unpack_tree(parts["layer.tar"], root)
            known = self.by_id[config["id"]] = FakeImage(config["id"], root, config["config"])
        for name in row["RepoTags"]:
            self.names[name] = known.id
        return row["RepoTags"]

    def build(self, context: bytes, dockerfile: str, tag: str) -> tuple[FakeImage, list[str]]:
        """FROM, COPY, ENV, WORKDIR and RUN: the image and the lines of output. Raises BuildError."""
        folder = self.directory / f"context-{secrets.token_hex(4)}"
        unpack_tree(context, folder)
        try:
            return self._build(folder, (folder / dockerfile).read_text(encoding="utf-8"), tag)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _build(self, folder: Path, text: str, tag: str) -> tuple[FakeImage, list[str]]:
        image: FakeImage | None = None
        said: list[str] = []
        rows = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        for number, row in enumerate(rows, 1):
            said.append(f"Step {number}/{len(rows)} : {row}\n")
            word, _, rest = row.partition(" ")
            if word == "FROM":
                base = self.find(rest)
                if base is None:
                    raise BuildError(f"pull access denied for {rest}, repository does not exist")
                image = self.add(tag, dict(base.config), base.root)
            elif image is None:
                raise BuildError("no build stage in current context")
            elif word == "COPY":
                source, target = shlex.split(rest)
                path = image.root / target.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / source, path)
            elif word == "ENV":
                image.config["Env"] = [*image.config["Env"], rest]
            elif word == "WORKDIR":
                image.config["WorkingDir"] = rest
            elif word == "RUN":
                command = chamber_command(image.root, "build", ["/bin/sh", "-c", rest])
                run = subprocess.run(
                    command,
                    capture_output=True,
                    timeout=_RUN_S,
                    check=False,
                    env={**os.environ, "PATH": PATH},
                )
                said.append((run.stdout + run.stderr).decode(errors="replace"))
                if run.returncode:
                    raise BuildError(
                        f"The command '/bin/sh -c {rest}' returned a non-zero code: {run.returncode}"
                    )
            else:
                raise BuildError(f"dockerfile parse error: unknown instruction: {word}")
        assert image is not None, "the first row was FROM"
        return image, [*said, f"Successfully built {image.id[7:19]}\n"]


def full_name(name: str) -> str:
    """`name` with its tag, and without what the engine takes for granted."""
    name = name.removeprefix("docker.io/").removeprefix("library/")
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def pack_tree(root: Path) -> bytes:
    """A directory as a tar archive, with owners. Runs at the root of what may be mounted elsewhere."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.iterdir()):
            if path.name not in ("proc", "dev"):
                archive.add(path, arcname=path.name)
    return buffer.getvalue()


def unpack_tree(data: bytes, root: Path) -> None:
    """The reverse. Raises tarfile.TarError."""
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(root, numeric_owner=True, filter="tar")


def copy_tree(source: Path, target: Path) -> None:
    """Copies a directory with owners and links."""
    unpack_tree(pack_tree(source), target)
