"""Makes segments from files: read, cut into grams, sort, write. Runs in a thread, or in processes of its own.

    Jobs ──> worker process: one segment at a time ──> lines of progress ──> the caller's callback

Memory is bounded by the size of a segment, not by that of the tree: about 660 MB per process at the default
of 64 MB of text. A file that vanishes meanwhile is left out; one that cannot be read is always a candidate.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.agent.index.grep.grams import LONGEST_BYTES, PairRanks, rank_pairs, sorted_once, text_keys
from etude.agent.index.grep.segment import MOST_DOCUMENTS, Document, Flags, write_segment
from etude.agent.index.grep.tree import stat_file
from etude.errors import StoreError

__all__ = ["Job", "Progress", "build_segment", "plan_jobs", "run_jobs", "sample_ranks", "serve"]

SEGMENT_BYTES = 64 << 20
LARGEST_BYTES = 64 << 20
"""A larger file is not cut into grams: ripgrep looks into it for every query."""
_BLOCK_BYTES = 256 << 10
_PIECE_BYTES = 1 << 20
_SAMPLE_FILES = 512
_SAMPLE_BYTES = 64 << 10
_MOST_BITS = 20
_FEWEST_BITS = 12
_LINE_BYTES = 64 << 20
_ODD_FOLDS = ("\N{KELVIN SIGN}".encode(), "\N{LATIN SMALL LETTER LONG S}".encode())
_UTF16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an indexing is."""

    done_files: int
    num_files: int
    done_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """One segment to make."""

    target: Path
    paths: tuple[bytes, ...]
    num_bytes: int


def read_file(root: bytes, path: bytes) -> tuple[Document, bytes] | None:
    """A file's record and what of its text is to be found; None if there is no regular file."""
    status = stat_file(root, path)
    if status is None:
        return None
    fixed = (path, status.st_size, status.st_mtime_ns)
    if status.st_size > LARGEST_BYTES:
        return Document(*fixed, bytes(16), Flags.ALWAYS), b""
    try:
        content = _read(root + b"/" + path)
    except FileNotFoundError:
        return None
    except OSError:
        return Document(*fixed, bytes(16), Flags.ALWAYS), b""
    text, flags = searched_text(content)
    return Document(*fixed, xxhash.xxh3_128_digest(content), flags), text


def _read(path: bytes) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(path)
        return file.read(LARGEST_BYTES)


def searched_text(content: bytes) -> tuple[bytes, int]:
    """What ripgrep can find in this content, at most, as UTF-8; and what is odd about it.

    UTF-16 with a byte order mark is decoded, as ripgrep does; behind a NUL it reports nothing.
    """
    encoding = _UTF16.get(content[:2])
    if encoding is not None:
        content = content[2:].decode(encoding, "replace").encode("utf-8", "replace")
    flags = 0
    nul = content.find(b"\0")
    if nul >= 0:
        flags, content = Flags.NUL, content[:nul]
    if any(odd in content for odd in _ODD_FOLDS):
        flags |= Flags.ODD_FOLD
    return content, flags


def build_segment(
    root: Path,
    job: Job,
    ranks: PairRanks,
    report: Callable[[int, int], None] = lambda files, num_bytes: None,
    stop: threading.Event | None = None,
) -> bool:
    """Makes one segment; `report` hears of files and bytes as they are done. False if `stop` was set."""
    documents: list[Document] = []
    keys: list[NDArray[np.uint64]] = []
    bits = min(_MOST_BITS, max(_FEWEST_BITS, (job.num_bytes // 48).bit_length()))
    text_bytes = 0
    for numbers, texts in _blocks(os.fsencode(root), job.paths, documents):
        if stop is not None and stop.is_set():
            return False
        keys.append(text_keys(texts, numbers, ranks, bits))
        text_bytes += sum(map(len, texts))
        report(len(set(numbers)), sum(map(len, texts)))
    write_segment(job.target, documents, sorted_once(keys), bits, text_bytes)
    return True


def _blocks(
    root: bytes, paths: Sequence[bytes], documents: list[Document]
) -> Iterator[tuple[list[int], list[bytes]]]:
    """Reads all files into `documents`, and gives their texts in blocks that fit the processor's cache."""
    numbers: list[int] = []
    texts: list[bytes] = []
    waiting = 0
    for path in paths:
        found = read_file(root, path)
        if found is None:
            continue
        document, text = found
        documents.append(document)
        for start in range(0, max(len(text), 1), _PIECE_BYTES):
            numbers.append(len(documents) - 1)
            texts.append(text[start : start + _PIECE_BYTES + LONGEST_BYTES - 1])
            waiting += len(texts[-1])
            if waiting >= _BLOCK_BYTES:
                yield numbers, texts
                numbers, texts, waiting = [], [], 0
    if texts:
        yield numbers, texts


def plan_jobs(root: Path, paths: Sequence[bytes], name: Callable[[], Path]) -> list[Job]:
    """Cuts sorted `paths` into segments of bounded size. Files that vanished are left out."""
    jobs: list[Job] = []
    part: list[bytes] = []
    size_bytes = 0
    base = os.fsencode(root)
    for path in paths:
        status = stat_file(base, path)
        if status is None:
            continue
        if part and (size_bytes + status.st_size > SEGMENT_BYTES or len(part) == MOST_DOCUMENTS):
            jobs.append(Job(name(), tuple(part), size_bytes))
            part, size_bytes = [], 0
        part.append(path)
        size_bytes += min(status.st_size, LARGEST_BYTES)
    if part:
        jobs.append(Job(name(), tuple(part), size_bytes))
    return jobs


def sample_ranks(root: Path, paths: Sequence[bytes]) -> PairRanks:
    """How rare each pair of bytes is, from files spread evenly over the tree."""
    step = max(1, len(paths) // _SAMPLE_FILES)
    found = (read_file(os.fsencode(root), path) for path in paths[::step])
    return rank_pairs(text[:_SAMPLE_BYTES] for _, text in filter(None, found))


async def run_jobs(
    root: Path,
    jobs: Sequence[Job],
    ranks: PairRanks,
    *,
    processes: int,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Makes all segments. Cancelled, it leaves no process and no half file. Raises StoreError."""
    totals = (sum(len(job.paths) for job in jobs), sum(job.num_bytes for job in jobs))
    done = [0, 0]

    def report(files: int, num_bytes: int) -> None:
        done[0], done[1] = done[0] + files, done[1] + num_bytes
        if progress is not None:
            progress(Progress(min(done[0], totals[0]), totals[0], min(done[1], totals[1]), totals[1]))

    if len(jobs) < 2 or processes < 2:
        await _in_thread(root, jobs, ranks, report)
        return
    waiting = sorted(jobs, key=lambda job: job.num_bytes)  # the largest is taken first
    ranks_path = jobs[0].target.with_name(f".ranks.{os.getpid()}.tmp")
    ranks_path.write_bytes(ranks.tobytes())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(processes, len(jobs))):
                group.create_task(_drive_worker(root, ranks_path, waiting, report))
    except* StoreError as errors:
        raise errors.exceptions[0] from None
    finally:
        ranks_path.unlink(missing_ok=True)


async def _in_thread(
    root: Path, jobs: Sequence[Job], ranks: PairRanks, report: Callable[[int, int], None]
) -> None:
    stop = threading.Event()
    loop = asyncio.get_running_loop()

    def heard(files: int, num_bytes: int) -> None:
        loop.call_soon_threadsafe(report, files, num_bytes)

    def work() -> None:
        for job in jobs:
            if not build_segment(root, job, ranks, heard, stop):
                return

    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([working])
        raise


async def _drive_worker(
    root: Path, ranks_path: Path, waiting: list[Job], report: Callable[[int, int], None]
) -> None:
    """Gives one worker process a job at a time until none is left."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from etude.agent.index.grep.builder import serve; serve()",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )
    assert worker.stdin is not None and worker.stdout is not None and worker.stderr is not None
    try:
        while waiting:
            job = waiting.pop()
            worker.stdin.write(_job_line(root, ranks_path, job))
            while True:
                line = await worker.stdout.readline()
                if not line:
                    words = (await worker.stderr.read()).decode("utf-8", "replace").strip()[-400:]
                    raise StoreError(
                        f"indexing failed: {words or 'its process died'}", received=str(job.target)
                    )
                said = json.loads(line)
                if "done" in said:
                    break
                report(said["files"], said["bytes"])
    finally:
        if worker.returncode is None:
            worker.kill()
        await asyncio.shield(worker.wait())


def _job_line(root: Path, ranks_path: Path, job: Job) -> bytes:
    fields = {
        "root": str(root),
        "ranks": str(ranks_path),
        "target": str(job.target),
        "paths": [os.fsdecode(path) for path in job.paths],
        "bytes": job.num_bytes,
    }
    return json.dumps(fields).encode() + b"\n"


def serve() -> None:
    """A worker process: jobs as lines of JSON on standard input, progress on standard output."""
    os.nice(5)  # whoever waits for a search goes first
    for line in sys.stdin.buffer:
        fields = json.loads(line)
        ranks = np.fromfile(fields["ranks"], np.uint16)
        paths = tuple(os.fsencode(path) for path in fields["paths"])
        job = Job(Path(fields["target"]), paths, fields["bytes"])

        def report(files: int, num_bytes: int) -> None:
            print(json.dumps({"files": files, "bytes": num_bytes}), flush=True)

        build_segment(Path(fields["root"]), job, ranks, report)
        print(json.dumps({"done": True}), flush=True)
