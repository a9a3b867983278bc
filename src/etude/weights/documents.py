"""Versions and manifests as plain JSON values: one format for all HTTP APIs that name weights.

Input is untrusted: every field is checked, and the error names the one that is wrong.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from etude.errors import UserError, WeightUpdateError
from etude.records import PolicyVersion, TensorEntry, WeightManifest
from etude.serving.errors import plain
from etude.serving.messages import Fields, check_fields

_NONE = type(None)
_LIST = (list, tuple)
_OPTIONAL = (str, _NONE)
_VERSION: Fields = {
    "lineage": (str,), "step": (int,), "digest": _OPTIONAL, "format": _OPTIONAL, "adapter": _OPTIONAL,
}  # fmt: skip
_ENTRY: Fields = {
    "name": (str,), "shape": _LIST, "dtype": (str,), "digest": (str,), "cuts": (*_LIST, _NONE),
}  # fmt: skip
_MANIFEST: Fields = {"version": (dict,), "tensors": _LIST, "url": (str,), "base": (dict, _NONE)}


def version_document(version: PolicyVersion) -> dict[str, Any]:
    """A version as JSON values."""
    return asdict(version)


def version_of(raw: object, field: str = "version") -> PolicyVersion:
    """Parses a version; digest, format and adapter are optional. Raises WeightUpdateError."""
    row = _read(raw, _VERSION, field)
    if row["step"] < 0:
        raise _wrong(f"{field}.step", row["step"], "a whole number from 0 on")
    return PolicyVersion(**row)


def manifest_document(manifest: WeightManifest) -> dict[str, Any]:
    """A manifest as JSON values."""
    return asdict(manifest)


def manifest_of(raw: object, field: str = "manifest") -> WeightManifest:
    """Parses a manifest; base and cuts are optional. Raises WeightUpdateError."""
    row = _read(raw, _MANIFEST, field)
    return WeightManifest(
        version_of(row["version"], f"{field}.version"),
        tuple(_entry_of(entry, f"{field}.tensors[{place}]") for place, entry in enumerate(row["tensors"])),
        row["url"],
        version_of(row["base"], f"{field}.base") if "base" in row else None,
    )


def _entry_of(raw: object, field: str) -> TensorEntry:
    row = _read(raw, _ENTRY, field)
    for name in row.keys() & {"shape", "cuts"}:
        if not all(type(number) is int and number >= 0 for number in row[name]):
            raise _wrong(f"{field}.{name}", row[name], "a list of whole numbers")
        row[name] = tuple(row[name])
    return TensorEntry(**row)


def _read(raw: object, fields: Fields, field: str) -> dict[str, Any]:
    """The checked fields of an object, without those that are null."""
    if not isinstance(raw, dict):
        raise _wrong(field, raw, "an object")
    try:
        found = check_fields(raw, fields)  # pyright: ignore[reportUnknownArgumentType]
    except UserError as error:
        where = f"{field}.{error.field}"
        raise WeightUpdateError(error.message, field=where, received=error.received, fix=error.fix) from error
    return {name: value for name, value in found.items() if value is not None}


def _wrong(field: str, raw: object, wanted: str) -> WeightUpdateError:
    return WeightUpdateError(f"must be {wanted}", field=field, received=plain(raw), fix=f"send {wanted}")
