"""Versions and manifests as plain JSON values: one form for all that name weights over HTTP.

What is read comes from elsewhere: every field is looked at, and the error names the one that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, cast

from etude.errors import WeightUpdateError
from etude.records import PolicyVersion, TensorEntry, WeightManifest

_VERSION = {one.name for one in fields(PolicyVersion)}
_MANIFEST = {one.name for one in fields(WeightManifest)}
_ENTRY = {one.name for one in fields(TensorEntry)}


def version_document(version: PolicyVersion) -> dict[str, Any]:
    """A version of the weights."""
    return asdict(version)


def version_of(raw: object, field: str = "version") -> PolicyVersion:
    """What `version_document` wrote; digest, format and adapter may be left out. Raises WeightUpdateError."""
    row = _object(raw, field, _VERSION)
    adapter = row.get("adapter")
    step = row.get("step")
    if type(step) is not int or step < 0:
        raise _wrong(f"{field}.step", step, "a whole number from 0 on")
    return PolicyVersion(
        lineage=_text(row.get("lineage"), f"{field}.lineage"),
        step=step,
        digest=_text(row.get("digest", ""), f"{field}.digest"),
        format=_text(row.get("format", "float32"), f"{field}.format"),
        adapter=None if adapter is None else _text(adapter, f"{field}.adapter"),
    )


def manifest_document(manifest: WeightManifest) -> dict[str, Any]:
    """A manifest whole."""
    return asdict(manifest)


def manifest_of(raw: object, field: str = "manifest") -> WeightManifest:
    """What `manifest_document` wrote; base and cuts may be left out. Raises WeightUpdateError."""
    row = _object(raw, field, _MANIFEST)
    tensors, base = _list(row.get("tensors"), f"{field}.tensors", "a list of objects"), row.get("base")
    return WeightManifest(
        version=version_of(row.get("version"), f"{field}.version"),
        tensors=tuple(_entry_of(entry, f"{field}.tensors[{place}]") for place, entry in enumerate(tensors)),
        url=_text(row.get("url"), f"{field}.url"),
        base=None if base is None else version_of(base, f"{field}.base"),
    )


def _entry_of(raw: object, field: str) -> TensorEntry:
    row = _object(raw, field, _ENTRY)
    shape, cuts = _numbers(row.get("shape"), f"{field}.shape"), _numbers(row.get("cuts", []), f"{field}.cuts")
    name, dtype, digest = (_text(row.get(key), f"{field}.{key}") for key in ("name", "dtype", "digest"))
    return TensorEntry(name, shape, dtype, digest, cuts)


def _object(raw: object, field: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise _wrong(field, raw, "an object")
    row = cast(Mapping[str, Any], raw)
    for name in row.keys() - known:
        raise WeightUpdateError(
            "there is no such field", field=f"{field}.{name}", received=_shown(row[name]), fix="leave it out"
        )
    return row


def _text(raw: object, field: str) -> str:
    if not isinstance(raw, str):
        raise _wrong(field, raw, "text")
    return raw


def _numbers(raw: object, field: str) -> tuple[int, ...]:
    numbers = _list(raw, field, "a list of whole numbers")
    if not all(type(one) is int and one >= 0 for one in numbers):
        raise _wrong(field, raw, "a list of whole numbers")
    return tuple(numbers)


def _list(raw: object, field: str, wanted: str) -> Sequence[Any]:
    if not isinstance(raw, list | tuple):
        raise _wrong(field, raw, wanted)
    return cast(Sequence[Any], raw)


def _wrong(field: str, raw: object, wanted: str) -> WeightUpdateError:
    return WeightUpdateError(f"must be {wanted}", field=field, received=_shown(raw), fix=f"send {wanted}")


def _shown(raw: object) -> object:
    return raw if isinstance(raw, str | int | float | None) else type(raw).__name__
