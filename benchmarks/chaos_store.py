"""A small S3-compatible server over a directory, for runs whose store is killed.

    python benchmarks/chaos_store.py --root DIRECTORY --port PORT

Acknowledged writes are on disk, so it survives SIGKILL and a restart. It implements what a weight store uses:
listing (version 2), GET, HEAD, PUT with `If-None-Match: *`, DELETE. The first part of a path is the bucket, a
directory. It has no authentication: for the loopback interface only.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

_PAGE = 1000
"""Most names in one listing response."""


class Objects:
    """Objects as files below a directory. Methods may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._count = 0
        self._lock = threading.Lock()

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(name, size) of the objects whose names begin with `prefix`, sorted."""
        found: list[tuple[str, int]] = []
        for path in self._root.rglob("*"):
            name = path.relative_to(self._root).as_posix()
            if name.startswith(prefix) and not path.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if path.is_file():
                        found.append((name, path.stat().st_size))
        return sorted(found)

    def read(self, name: str) -> bytes | None:
        """The object's content; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            return self._at(name).read_bytes()
        return None

    def write(self, name: str, data: bytes, new_only: bool) -> bool:
        """Writes atomically and durably; False if `new_only` is set and the object exists."""
        path = self._at(name)
        with self._lock:
            self._count += 1
            temporary = path.with_name(f".{path.name}.{os.getpid()}.{self._count}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if new_only:
                os.link(temporary, path)
            else:
                temporary.replace(path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        _sync(path.parent)
        return True

    def delete(self, name: str) -> None:
        """Deletes an object; idempotent."""
        path = self._at(name)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            _sync(path.parent)

    def _at(self, name: str) -> Path:
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root.resolve()):
            raise ValueError(name)
        return path


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    objects: Objects

    def do_GET(self) -> None:
        """An object, or a list of names."""
        name, query = self._asked()
        if "list-type" in query:
            self._answer(200, self._listing(name, query))
        elif (data := self.objects.read(name)) is None:
            self._refuse(404, "NoSuchKey")
        else:
            self._answer(200, data, "application/octet-stream")

    def do_HEAD(self) -> None:
        """An object's size."""
        data = self.objects.read(self._asked()[0])
        if data is None:
            self._refuse(404, "NoSuchKey")
        else:
            self._answer(200, data, "application/octet-stream")

    def do_PUT(self) -> None:
        """Writes an object; with `If-None-Match: *` only where there is none."""
        num_bytes = int(self.headers.get("content-length", "0"))
        data = self.rfile.read(num_bytes)
        if len(data) < num_bytes:
            self.close_connection = True  # the client was killed in the middle: no answer is needed
        elif "aws-chunked" in self.headers.get("content-encoding", ""):
            self._refuse(501, "NotImplemented")
        elif self.objects.write(self._asked()[0], data, self.headers.get("if-none-match") == "*"):
            self._answer(200, b"")
        else:
            self._refuse(412, "PreconditionFailed")

    def do_DELETE(self) -> None:
        """Deletes an object, if there is one."""
        self.objects.delete(self._asked()[0])
        self._answer(204, b"")

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Logs nothing."""

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).strip("/"), parse_qs(parts.query, keep_blank_values=True)

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", [""])[0]
        start = len(bucket) + 1
        named = [(name[start:], size) for name, size in self.objects.list(f"{bucket}/{prefix}")]
        named = [(name, size) for name, size in named if name > after]
        page, more = named[:_PAGE], len(named) > _PAGE
        rows = "".join(
            f"<Contents><Key>{escape(quote(name))}</Key><Size>{size}</Size><ETag>&quot;0&quot;</ETag>"
            "<LastModified>2020-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for name, size in page
        )
        token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<Name>{escape(bucket)}</Name><Prefix>{escape(quote(prefix))}</Prefix>"
            f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{_PAGE}</MaxKeys><EncodingType>url</EncodingType>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
        ).encode()

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self._answer(status, body.encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/xml") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("etag", f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"')
        if status != 204:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    handler = type("StoreHandler", (Handler,), {"objects": Objects(arguments.root)})
    ThreadingHTTPServer(("127.0.0.1", arguments.port), handler).serve_forever()


if __name__ == "__main__":
    main()
