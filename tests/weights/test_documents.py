"""Versions and manifests as JSON: lossless round trips, and invalid ones refused with the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import WeightUpdateError
from etude.records import PolicyVersion, TensorEntry, WeightManifest
from etude.weights.documents import manifest_document, manifest_of, version_document, version_of

texts = st.text(max_size=12)
numbers = st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple)
versions = st.builds(PolicyVersion, texts, st.integers(0, 1 << 40), texts, texts, adapter=st.none() | texts)
entries = st.builds(TensorEntry, texts, numbers, texts, texts, numbers)
manifests = st.builds(
    WeightManifest, versions, st.lists(entries, max_size=4).map(tuple), texts, st.none() | versions
)
ENTRY = {"name": "w", "shape": [1], "dtype": "f", "digest": "00"}
GOOD = manifest_document(
    WeightManifest(PolicyVersion("run", 5, "abc"), (TensorEntry("w", (2, 3), "float32", "00"),), "memory:x")
)


@given(manifest=manifests)
def test_a_manifest_goes_through_json_and_back(manifest: WeightManifest) -> None:
    assert manifest_of(json.loads(json.dumps(manifest_document(manifest)))) == manifest


@given(version=versions)
def test_a_version_goes_through_json_and_back(version: PolicyVersion) -> None:
    assert version_of(json.loads(json.dumps(version_document(version)))) == version


def test_what_may_be_left_out_may() -> None:
    short = {"version": {"lineage": "run", "step": 0}, "tensors": [], "url": "memory:x"}
    assert manifest_of(short) == WeightManifest(PolicyVersion("run", 0), (), "memory:x")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": None}, "manifest.version"),
        ({"version": {"lineage": "run"}}, "manifest.version.step"),
        ({"version": {"lineage": "run", "step": -1}}, "manifest.version.step"),
        ({"version": {"lineage": "run", "step": True}}, "manifest.version.step"),
        ({"version": {"lineage": [], "step": 1}}, "manifest.version.lineage"),
        ({"version": {"lineage": "run", "step": 1, "adapter": 3}}, "manifest.version.adapter"),
        ({"version": {"lineage": "run", "step": 1, "colour": "red"}}, "manifest.version.colour"),
        ({"base": 1}, "manifest.base"),
        ({"url": None}, "manifest.url"),
        ({"tensors": {}}, "manifest.tensors"),
        ({"tensors": [7]}, "manifest.tensors[0]"),
        ({"tensors": [{"name": "w", "shape": 3}]}, "manifest.tensors[0].shape"),
        ({"tensors": [ENTRY | {"shape": ["x"]}]}, "manifest.tensors[0].shape"),
        ({"tensors": [ENTRY | {"cuts": [-1]}]}, "manifest.tensors[0].cuts"),
        ({"tensors": [ENTRY | {"digest": 1}]}, "manifest.tensors[0].digest"),
        ({"extra": 1}, "manifest.extra"),
    ],
)
def test_what_is_no_manifest_is_refused_by_the_fields_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(WeightUpdateError) as caught:
        manifest_of(GOOD | change)
    assert caught.value.field == field


@pytest.mark.parametrize("raw", [None, [], "run@5", 3])
def test_what_is_no_object_is_refused(raw: object) -> None:
    for read in (manifest_of, version_of):
        with pytest.raises(WeightUpdateError, match="must be an object"):
            read(raw)
