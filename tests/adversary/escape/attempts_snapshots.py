"""Attempts by hostile snapshots: exported files that were taken apart, changed and put together again."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

from blake3 import blake3

from etude.errors import EtudeError
from etude.sandbox.template import Template
from tests.adversary.escape.attempts_calls import found
from tests.adversary.escape.model import Attempt
from tests.adversary.escape.trial import Field


async def import_names_that_climb(field: Field) -> str:
    """An exported snapshot whose members lead out of the snapshot directory."""
    data = field.directory / "data"
    data.write_text("x")
    archive = field.directory / "hostile.tar"
    with tarfile.open(archive, "w") as file:
        file.add(data, arcname="../../planted")
    try:
        await field.backend.import_snapshot(archive)
        refusal = "nothing"
    except EtudeError as error:
        refusal = f"{type(error).__name__}: {error.message}"
    planted = list(_state_of(field).rglob("planted"))
    return f"ESCAPED {planted[0].name} beside the snapshots" if planted else f"refused: {refusal}"


async def import_a_foreign_id(field: Field) -> str:
    """A manifest whose id leads out of the snapshot directory."""
    files = await _exported(field)
    _forge(files, {"id": "../planted"})
    try:
        await field.backend.import_snapshot(_archive(field, files))
        refusal = "nothing"
    except EtudeError as error:
        refusal = f"{type(error).__name__}: {error.message}"
    planted = list(_state_of(field).glob("planted"))
    return "ESCAPED a directory beside the snapshots" if planted else f"refused: {refusal}"


async def import_damaged_files(field: Field) -> str:
    """A file of an exported snapshot that was changed on its way."""
    files = await _exported(field)
    template = files / "template"
    template.write_bytes(template.read_bytes().replace(b"original", b"modified"))
    try:
        info = await field.backend.import_snapshot(_archive(field, files))
        sandbox = await field.backend.create(snapshot=info.id)
    except EtudeError as error:
        return f"refused: {type(error).__name__}: {error.message}"
    try:
        return found(await sandbox.files.read("kept.txt"), b"modified")
    finally:
        await sandbox.kill()


async def import_a_layer_that_climbs(field: Field) -> str:
    """A layer, with a manifest that fits it, whose members lead into another sandbox's template."""
    victim = Template({"victim.txt": field.scene.neighbour_secret[:14]}, "victim")
    await (await field.backend.create(victim)).kill()
    files = await _exported(field)
    planted = field.directory / "planted.txt"
    planted.write_text("planted")
    layer = next(files.glob("layer-0-root*"))
    with tarfile.open(layer, "w") as file:
        file.add(planted, arcname=f"../../../templates/{victim.digest}/planted.txt")
    _forge(files, {"id": "snap-hostile"})
    refusal = "nothing"
    try:
        info = await field.backend.import_snapshot(_archive(field, files))
        await (await field.backend.create(snapshot=info.id)).kill()
    except EtudeError as error:
        refusal = f"{type(error).__name__}: {error.message[:150]}"
    sandbox = await field.backend.create(victim)
    try:
        names = {entry.path for entry in await sandbox.files.list()}
    finally:
        await sandbox.kill()
    return "ESCAPED into another template" if "planted.txt" in names else f"refused: {refusal}"


def _state_of(field: Field) -> Path:
    """The state directory of a backend that keeps one."""
    state = getattr(field.backend, "state", None)
    assert isinstance(state, Path), "snapshots are tried on backends with a state directory"
    return state


async def _exported(field: Field) -> Path:
    """A real exported snapshot, taken apart."""
    sandbox = await field.backend.create(Template({"kept.txt": "original"}))
    try:
        await sandbox.files.write("more.txt", "more")
        info = await sandbox.create_snapshot("filesystem")
    finally:
        await sandbox.kill()
    await field.backend.export_snapshot(info.id, field.directory / "exported.tar")
    await field.backend.delete_snapshot(info.id)
    files = field.directory / "files"
    files.mkdir()
    with tarfile.open(field.directory / "exported.tar") as archive:
        for member in archive.getmembers():
            data = archive.extractfile(member)
            assert data is not None
            (files / member.name).write_bytes(data.read())
    return files


def _forge(files: Path, changes: dict[str, object]) -> None:
    """Changes a manifest, and makes its digests fit the files and itself."""
    path = files / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.update(changes)
    del manifest["digest"]
    for name in manifest["files"]:
        data = (files / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "digest": blake3(data).hexdigest()}
    manifest["digest"] = blake3(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


def _archive(field: Field, files: Path) -> Path:
    target = field.directory / "hostile.tar"
    with tarfile.open(target, "w") as archive:
        for path in sorted(files.iterdir()):
            archive.add(path, arcname=path.name)
    shutil.rmtree(files)
    return target


SNAPSHOTS = [
    Attempt(
        "import a snapshot with names that climb",
        "members of an exported snapshot have plain names",
        ("names of snapshots checked",),
        scenario=import_names_that_climb,
    ),
    Attempt(
        "import a snapshot with another place as its id",
        "the id of a snapshot is a plain name",
        ("names of snapshots checked",),
        scenario=import_a_foreign_id,
    ),
    Attempt(
        "import a snapshot that was changed on its way",
        "every byte has a digest",
        ("digests of snapshots checked",),
        scenario=import_damaged_files,
    ),
    Attempt(
        "import a layer with names that climb",
        "members of a layer stay below it",
        ("layers unpacked by our own code",),
        scenario=import_a_layer_that_climbs,
    ),
]
