"""Templates: the initial files of a sandbox's workspace and, optionally, its root file system image."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from etude.errors import ConfigError
from etude.sandbox.errors import SnapshotError, TemplateError
from etude.sandbox.inside.frames import FrameError, Unpacker
from etude.sandbox.paths import WORKSPACE, normal_path

MAX_DEPTH = 100
"""Most names in one path: no repository nests directories more deeply."""
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3840
"""Most bytes of one name, which is Linux's limit, and of a whole path, with room for a prefix."""


@dataclass(frozen=True)
class Image:
    """A root file system as a stack of content-addressed layers, and how programs run in it.

    The layer store (`sandbox/images/`) maps layer digests to directories.
    """

    name: str
    layers: tuple[str, ...]
    """Layer digests, lowest first."""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = WORKSPACE
    """Absolute; the workspace of sandboxes made from it, unless it is `/`."""
    user: str = "root"

    @cached_property
    def digest(self) -> str:
        """BLAKE2b hex digest over layers and configuration, without the name."""
        rows = [*self.layers, self.workdir, self.user, *(f"{k}={v}" for k, v in sorted(self.env.items()))]
        return hashlib.blake2b("\0".join(rows).encode(), digest_size=20).hexdigest()


@dataclass(frozen=True)
class Template:
    """The initial files of a sandbox. Equal digests mean equal files."""

    files: Mapping[str, bytes | str] = field(default_factory=dict)
    """Workspace-relative path -> content; text is stored as UTF-8."""
    name: str = "template"
    image: Image | None = None
    """Root file system; None: the programs of the host (or of the guest's base image), read-only."""
    directory: str = ""
    """Absolute path of a host directory that is used as the workspace in place, at the same path, so that
    changes there are permanent. Empty: the workspace is a copy of `files`."""
    passed_over: frozenset[str] = frozenset()
    """Names that listings and searches of `directory` skip, with everything below them."""
    _bytes: dict[str, bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        contents = {
            normal_path(path, self.workspace): data.encode() if isinstance(data, str) else bytes(data)
            for path, data in self.files.items()
        }
        _check_paths(contents)
        object.__setattr__(self, "_bytes", contents)

    @property
    def workspace(self) -> str:
        """Absolute path of the workspace inside. Never `/`: a whole root is no workspace."""
        if self.directory:
            return self.directory
        return WORKSPACE if self.image is None or self.image.workdir == "/" else self.image.workdir

    @property
    def contents(self) -> Mapping[str, bytes]:
        """The files as bytes, keyed by normalised path."""
        return self._bytes

    @cached_property
    def digest(self) -> str:
        """BLAKE2b hex digest over sorted paths and contents, and the image's if there is one."""
        state = hashlib.blake2b(digest_size=20)
        for path in sorted(self._bytes):
            data = self._bytes[path]
            name = path.encode(errors="surrogateescape")
            state.update(b"%d %d " % (len(name), len(data)) + name + data)
        if self.image is not None:
            state.update(b"image " + self.image.digest.encode())
        if self.directory:
            state.update(b"directory " + os.fsencode(self.directory))
        return state.hexdigest()

    def check_copyable(self) -> None:
        """Raises TemplateError if the workspace is a directory of this host."""
        if self.directory:
            raise TemplateError(
                "a sandbox that works in a host directory can be neither copied nor moved",
                field="template.directory",
                received=self.directory,
                fix="use a copy: Template.from_directory",
            )

    @classmethod
    def from_directory(cls, path: str | Path, image: Image | None = None) -> Template:
        """Reads every regular file below `path`, without symbolic links.

        Raises ConfigError if `path` is not a directory.
        """
        root = Path(path)
        if not root.is_dir():
            raise ConfigError(
                "no such directory", field="template", received=str(path), fix="name a directory"
            )
        found = sorted(entry for entry in root.rglob("*") if entry.is_file() and not entry.is_symlink())
        return cls(
            {entry.relative_to(root).as_posix(): entry.read_bytes() for entry in found}, root.name, image
        )


def _check_paths(contents: Mapping[str, bytes]) -> None:
    """Raises TemplateError for paths that a directory cannot or should not contain."""
    folders: set[str] = set()
    for path in contents:
        names = path.split("/")
        if path == ".":
            raise _refused("is the workspace itself", path, "name a file in it")
        if len(names) > MAX_DEPTH:
            raise _refused(f"more than {MAX_DEPTH} names in one path", path, "nest directories less deeply")
        try:
            sizes = [len(os.fsencode(name)) for name in names]
        except UnicodeEncodeError:
            raise _refused("is not valid Unicode", path, "use Unicode text") from None
        if max(sizes) > MAX_NAME_BYTES or sum(sizes) + len(sizes) > MAX_PATH_BYTES:
            longest = f"{MAX_NAME_BYTES} bytes in a name, {MAX_PATH_BYTES} in a path"
            raise _refused("the path is too long", path, f"at most {longest}")
        folders.update("/".join(names[:count]) for count in range(1, len(names)))
    for path in folders & contents.keys():
        raise _refused("is both a file and a directory", path, "leave out one of them")


def _refused(message: str, path: str, fix: str) -> TemplateError:
    shown = path if len(path) <= 120 else f"{path[:120]}... ({len(path)} characters)"
    return TemplateError(message, field="template.files", received=shown, fix=fix)


def decode_image(raw: Any) -> Image:
    """Decodes an image that `dataclasses.asdict` encoded. Raises TypeError, KeyError or AttributeError for
    anything else."""
    image = Image(**{**raw, "layers": tuple(raw["layers"])})
    texts = (image.name, image.workdir, image.user, *image.layers, *image.env, *image.env.values())
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("an image is described in texts")
    return image


def encode_template(template: Template) -> tuple[dict[str, Any], bytes]:
    """Encodes a template; `decode_template` restores it with the same digest. Raises as `check_copyable`."""
    template.check_copyable()
    contents = template.contents
    image = None if template.image is None else dataclasses.asdict(template.image)
    rows = [[path, len(data)] for path, data in contents.items()]
    return {"name": template.name, "image": image, "files": rows}, b"".join(contents.values())


def decode_template(header: Any, data: bytes) -> Template:
    """Decodes what `encode_template` wrote. Raises ValueError, TypeError or KeyError for anything else."""
    files: dict[str, bytes | str] = {}
    start = 0
    for path, size in header["files"]:
        if not isinstance(path, str) or not isinstance(size, int) or size < 0:
            raise ValueError("files are no rows of path and size")
        files[path] = data[start : start + size]
        start += size
    if start != len(data):
        raise ValueError("sizes and contents differ")
    image = None if header["image"] is None else decode_image(header["image"])
    if not isinstance(header["name"], str):
        raise TypeError("the name is no text")
    return Template(files, header["name"], image)


def template_key(template: Template) -> str:
    """The key of a template on the wire: a digest of content, name and image."""
    image = template.image
    rows = [template.digest, template.name, "" if image is None else image.name]
    return hashlib.blake2b("\0".join(rows).encode(), digest_size=20).hexdigest()


def unpack_templates(data: bytes, origin: str, count: int) -> list[Template]:
    """Decodes the templates in `count` frames of a snapshot. Raises SnapshotError."""
    try:
        frames = Unpacker().feed(data)
        if len(frames) != count:
            raise ValueError(f"{len(frames)} frames")
        return [decode_template(header, payload) for header, payload in frames]
    except (FrameError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(
            f"the snapshot's template is invalid: {error}",
            field="snapshot",
            received=origin,
            fix="create the snapshot again",
        ) from error
