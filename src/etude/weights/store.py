"""The weight store: versions under a URL, as chains of deltas with periodic full snapshots.

    commits/000000000012.json     one record per version, written last: its files are complete
    files/000000000012-.../       update files: `delta-00000.etude`, `full-00000.etude`
    writers/ pins/ wanted/        the writer's lease; what readers need; requests for a full snapshot

A version exists once its commit does: readers never see a partial one.
"""

from __future__ import annotations

import json
import time
from typing import Any

from etude.errors import WeightUpdateError
from etude.kit.retry import Backoff, retry
from etude.weights.commits import COMMITS, Commit, commit_name, sequence_of, unpack_commit
from etude.weights.folders import Folder, MissingError, open_folder

FILES, PINS, WANTED = "files", "pins", "wanted"
URL_SCHEME = "weights:"
_POLL_S = 0.05
_LONGEST_POLL_S = 1.0


class WeightStore:
    """Operations shared by readers and the writer of a store. Methods may be called from any thread."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._known: dict[int, Commit] = {}

    @classmethod
    def open(cls, url: str, **options: Any) -> WeightStore:
        """See open_folder."""
        return cls(open_folder(url, **options))

    def commits(self) -> dict[int, Commit]:
        """All commits by sequence number. Damaged ones are left out: no readable version needs them."""
        found: dict[int, Commit] = {}
        for name in self.folder.list(COMMITS):
            sequence = sequence_of(name)
            if sequence is None:
                continue
            commit = self._known.get(sequence)
            if commit is None:
                try:
                    commit = unpack_commit(self.folder.read(name))
                except (MissingError, WeightUpdateError):  # collected meanwhile, or damaged
                    continue
            found[sequence] = commit
        self._known = found
        return dict(found)

    def newest_sequence(self) -> int:
        """The largest sequence number of all commits, including damaged ones; 0 without any."""
        return max((sequence_of(name) or 0 for name in self.folder.list(COMMITS)), default=0)

    def wait_for(self, sequence: int, wait_s: float) -> Commit:
        """The commit of this number; waits while it is being published. Raises WeightUpdateError after
        `wait_s`."""

        def on_failure(failure: MissingError, pause_s: float | None) -> None:
            is_past = self.newest_sequence() > sequence
            if pause_s is None or (is_past and commit_name(sequence) not in self.folder.list(COMMITS)):
                raise WeightUpdateError(
                    f"the version did not appear within {wait_s:g} s, or was deleted",
                    field="url",
                    received=self.version_url(sequence),
                    fix="check whether the publisher runs, or stage a newer version",
                ) from failure

        backoff = Backoff(_POLL_S, _LONGEST_POLL_S, within_s=wait_s)
        data = retry(
            lambda: self.folder.read(commit_name(sequence)), MissingError, backoff, on_failure=on_failure
        )
        commit = unpack_commit(data)
        if commit.sequence != sequence:
            raise WeightUpdateError("the commit has a wrong number", field="commit", received=sequence)
        return commit

    def version_url(self, sequence: int) -> str:
        """The `url` of a WeightManifest for this version."""
        return f"{URL_SCHEME}{self.folder.url}#{sequence}"

    # ---- notes of readers for the writer -------------------------------------------------------

    def pin(self, reader: str, sequence: int, keep_s: float) -> None:
        """Asks the writer to keep commits from `sequence` on until `keep_s` after it has seen this pin, or
        until this reader's next pin."""
        self.folder.write(
            f"{PINS}/{reader}.json", json.dumps({"sequence": sequence, "keep_s": keep_s}).encode()
        )

    def request_snapshot(self, reader: str) -> None:
        """Asks the writer to publish the next version with a full snapshot."""
        self.folder.write(f"{WANTED}/{reader}", b"full")


def split_url(url: str) -> tuple[str, int]:
    """Store and sequence number in a manifest's URL. Raises WeightUpdateError."""
    place, _, number = url.removeprefix(URL_SCHEME).rpartition("#")
    if not url.startswith(URL_SCHEME) or not place or not number.isdigit():
        raise WeightUpdateError(
            "is not the URL of a version", field="url", received=url, fix=f"name {URL_SCHEME}STORE#NUMBER"
        )
    return place, int(number)


class Pins:
    """The readers' pins as seen by the writer. They expire by its own clock, from when it first saw each."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[bytes, float]] = {}

    def lowest(self) -> int | None:
        """The lowest pinned sequence number, or None. Deletes expired pins."""
        wanted: list[int] = []
        for name in self._folder.list(PINS):
            try:
                data = self._folder.read(name)
                values = json.loads(data)
                sequence, keep_s = int(values["sequence"]), float(values["keep_s"])
            except (MissingError, ValueError, KeyError, TypeError):
                continue
            content, since = self._seen.get(name, (b"", 0.0))
            if content != data:
                since = time.monotonic()
                self._seen[name] = (data, since)
            if time.monotonic() - since > keep_s:
                self._folder.delete(name)
                self._seen.pop(name, None)
            else:
                wanted.append(sequence)
        return min(wanted, default=None)
