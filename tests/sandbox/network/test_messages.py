"""Request heads: unambiguous ones are forwarded, all others are refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.sandbox.network.messages import (
    MAX_HEAD_BYTES,
    Framing,
    Refusal,
    RequestHead,
    client_head,
    parse_request_head,
    parse_response_head,
    upstream_head,
)

GET = b"GET http://example.org/a?b=c HTTP/1.1\r\nHost: example.org\r\n"
POST = b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\n"
PIECES = st.sampled_from(
    [
        b"GET ", b"POST ", b"CONNECT ", b"http://", b"https://", b"example.org", b"127.0.0.1", b"[::1]",
        b":80", b":443", b"/", b"?q", b"#f", b"@", b"\\", b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2", b"\r\n",
        b"\r", b"\n", b"\r\n\r\n", b"Host: example.org", b"Host:", b"Content-Length: 5",
        b"Content-Length: +5", b"\t", b" ",
        b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
        b"Connection: close", b"X: \x00", b"Connection: Host, Content-Length", b"\xff", b"a: b",
    ]
)  # fmt: skip


def refused(data: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse_request_head(data)
    return caught.value


def test_a_plain_request_is_understood() -> None:
    head = parse_request_head(GET + b"Accept: */*\r\n\r\n")
    assert (head.method, head.target.host, head.target.port) == ("GET", "example.org", 80)
    assert (head.target.path, head.framing, head.keep_alive) == ("/a?b=c", Framing("none"), True)


def test_a_connect_request_is_understood() -> None:
    head = parse_request_head(b"CONNECT Example.org.:443 HTTP/1.0\r\n\r\n")
    assert (head.method, head.target.host, head.target.port) == ("CONNECT", "example.org", 443)
    head = parse_request_head(b"CONNECT [::1]:443 HTTP/1.1\r\nHost: [::1]:443\r\n\r\n")
    assert head.target.host == "::1"


def test_a_query_without_a_path_gets_one() -> None:
    head = parse_request_head(b"GET http://example.org?x HTTP/1.1\r\nHost: example.org\r\n\r\n")
    assert head.target.path == "/?x"


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1",
        b"GET https://example.org/ HTTP/1.1",
        b"GET ftp://example.org/ HTTP/1.1",
        b"GET http:///path HTTP/1.1",
        b"GET http://example.org:/ HTTP/1.1",
        b"GET http://example.org:80x/ HTTP/1.1",
        b"GET http://user:secret@example.org/ HTTP/1.1",
        b"GET http://example.org/#f HTTP/1.1",
        b"GET http://example.org\\@evil.example/ HTTP/1.1",
        b"GET http://example.org/a b HTTP/1.1",
        b"GET  http://example.org/ HTTP/1.1",
        b"GET http://example.org/ HTTP/2.0",
        b"GET http://example.org/ HTTP/1.1 ",
        b"GET http://ex\xc3\xa4mple.org/ HTTP/1.1",
        b"G(T http://example.org/ HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"CONNECT example.org HTTP/1.1",
        b"CONNECT http://example.org:443 HTTP/1.1",
        b"CONNECT user@example.org:443 HTTP/1.1",
        b"CONNECT example.org:443/ HTTP/1.1",
        b"CONNECT ::1:443 HTTP/1.1",
        b"",
    ],
)
def test_other_request_lines_are_refused(line: bytes) -> None:
    assert refused(line + b"\r\nHost: example.org\r\n\r\n").status == 400


def test_credentials_are_no_part_of_what_is_logged() -> None:
    refusal = refused(b"GET http://user:secret@example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n")
    assert refusal.received == "example.org"
    assert "secret" not in refusal.message


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "ambiguous_length"),
        (b"Transfer-Encoding: chunked\r\ncontent-length: 5\r\n", "ambiguous_length"),
        (b"Content-Length: 5\r\nContent-Length: 5\r\n", "ambiguous_length"),
        (b"Content-Length: 5\r\nContent-Length: 6\r\n", "ambiguous_length"),
        (b"Content-Length: 5, 5\r\n", "ambiguous_length"),
        (b"Content-Length: +5\r\n", "ambiguous_length"),
        (b"Content-Length: -1\r\n", "ambiguous_length"),
        (b"Content-Length: 0x5\r\n", "ambiguous_length"),
        (b"Content-Length: 5 5\r\n", "ambiguous_length"),
        (b"Content-Length:\r\n", "ambiguous_length"),
        (b"Content-Length: " + b"9" * 16 + b"\r\n", "ambiguous_length"),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "ambiguous_length"),
        (b"Transfer-Encoding: xchunked\r\n", "coding"),
        (b"Transfer-Encoding: gzip, chunked\r\n", "coding"),
        (b"Transfer-Encoding: chunked, identity\r\n", "coding"),
        (b"Transfer-Encoding: \x0bchunked\r\n", "malformed"),
        (b"Transfer-Encoding : chunked\r\n", "malformed"),
        (b"Content-Length : 5\r\n", "malformed"),
        (b" Content-Length: 5\r\n", "malformed"),
        (b"X: a\r\n b\r\n", "malformed"),
        (b"X: a\r\n\tTransfer-Encoding: chunked\r\n", "malformed"),
        (b"X: a\nTransfer-Encoding: chunked\r\n", "malformed"),
        (b"X: a\rTransfer-Encoding: chunked\r\n", "malformed"),
        (b"X: \x00\r\n", "malformed"),
        (b": a\r\n", "malformed"),
        (b"no colon\r\n", "malformed"),
        (b"Host: example.org\r\n", "malformed"),
        (b"a: b\r\n" * 200, "malformed"),
    ],
)
def test_forms_that_smuggle_requests_are_refused(headers: bytes, reason: str) -> None:
    assert refused(POST + headers + b"\r\n").reason == reason


def test_http_1_0_has_no_chunks() -> None:
    refused(b"POST http://example.org/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n")


@pytest.mark.parametrize("host", [b"evil.example", b"example.org:81", b"127.0.0.1", b"a@example.org", b""])
def test_a_host_header_that_names_another_host_is_refused(host: bytes) -> None:
    refusal = refused(b"GET http://example.org/ HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert refusal.reason in ("host_mismatch", "bad_host")


def test_a_request_without_a_host_header_is_refused() -> None:
    refused(b"GET http://example.org/ HTTP/1.1\r\n\r\n")


def test_a_huge_head_is_refused() -> None:
    refusal = refused(GET + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
    assert refusal.status == 431


def test_headers_of_one_connection_are_dropped() -> None:
    head = parse_request_head(
        GET
        + b"Proxy-Authorization: Basic c2VjcmV0\r\nProxy-Connection: keep-alive\r\n"
        + b"Keep-Alive: 5\r\nTE: trailers\r\nUpgrade: websocket\r\n"
        + b"Connection: X-Private, Upgrade\r\nX-Private: 1\r\nX-Public: 2\r\n\r\n"
    )
    sent = upstream_head(head)
    assert sent == (
        b"GET /a?b=c HTTP/1.1\r\nHost: example.org\r\nX-Public: 2\r\n"
        b"Via: 1.1 etude\r\nConnection: close\r\n\r\n"
    )


def test_connection_cannot_name_away_what_frames_the_body() -> None:
    head = parse_request_head(POST + b"Content-Length: 5\r\nConnection: content-length, host\r\n\r\n")
    sent = upstream_head(head)
    assert b"\r\nContent-Length: 5\r\n" in sent
    assert b"\r\nHost: example.org\r\n" in sent


def is_unambiguous(head: RequestHead) -> bool:
    """What a server gets reads as the same request by the same strict reading; no stray line ends."""
    sent = upstream_head(head)
    assert sent.endswith(b"\r\n\r\n") and sent.count(b"\r\n\r\n") == 1
    assert b"\n" not in sent.replace(b"\r\n", b"") and b"\r" not in sent.replace(b"\r\n", b"")
    first, _, rest = sent.partition(b"\r\n")
    method, path, version = first.split(b" ")
    host = head.target.host.encode()
    url = b"http://" + (b"[%b]" % host if b":" in host else host) + b":%d" % head.target.port
    again = parse_request_head(method + b" " + url + path + b" " + version + b"\r\n" + rest)
    return (again.method, again.target, again.framing) == (head.method, head.target, head.framing)


@given(st.binary() | st.lists(PIECES).map(b"".join) | st.binary().map(lambda b: GET + b + b"\r\n\r\n"))
@example(GET + b"\r\n")
def test_any_bytes_are_refused_or_one_request(data: bytes) -> None:
    try:
        head = parse_request_head(data)
    except Refusal as refusal:
        assert refusal.status in (400, 431, 501)
        assert refusal.response().isascii()
        return
    assert head.method == "CONNECT" or is_unambiguous(head)


@given(
    st.sampled_from([b"GET", b"POST", b"PUT", b"X-ODD"]),
    st.sampled_from([b"example.org", b"[2606::1]:8080", b"1.2.3.4", b"a.b.c:65535"]),
    st.from_regex(rb"(/[!-~]{0,8}){0,3}", fullmatch=True).filter(lambda path: not set(path) & set(b"#\\")),
    st.lists(
        st.tuples(
            st.from_regex(rb"[A-Za-z-]{1,8}", fullmatch=True),
            st.from_regex(rb"[ -~\x80-\xff]{0,12}", fullmatch=True),
        ),
        max_size=5,
    ),
    st.sampled_from([b"", b"Content-Length: 12\r\n", b"Transfer-Encoding: chunked\r\n"]),
)
def test_well_formed_requests_pass(
    method: bytes, authority: bytes, path: bytes, headers: list[tuple[bytes, bytes]], framing: bytes
) -> None:
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers if name.lower() != b"host")
    data = method + b" http://" + authority + path + b" HTTP/1.1\r\nHost: " + authority + b"\r\n"
    assert is_unambiguous(parse_request_head(data + lines + framing + b"\r\n"))


@pytest.mark.parametrize(
    ("method", "head", "framing"),
    [
        ("GET", b"200 OK\r\nContent-Length: 5", Framing("length", 5)),
        ("GET", b"200\r\nContent-Length: 5", Framing("length", 5)),
        ("GET", b"200 OK\r\nTransfer-Encoding: Chunked", Framing("chunked")),
        ("GET", b"200 OK", Framing("close")),
        ("HEAD", b"200 OK\r\nContent-Length: 5", Framing("none")),
        ("GET", b"304 Not Modified\r\nContent-Length: 5", Framing("none")),
        ("GET", b"204 No Content", Framing("none")),
        ("GET", b"100 Continue", Framing("none")),
    ],
)
def test_a_responses_body_is_framed_by_its_request_and_status(
    method: str, head: bytes, framing: Framing
) -> None:
    assert parse_response_head(b"HTTP/1.1 " + head + b"\r\n\r\n", method).framing == framing


def test_a_head_keeps_its_length_although_it_has_no_body() -> None:
    response = parse_response_head(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD")
    assert b"Content-Length: 5\r\n" in client_head(response, Framing("none"), True)


@given(
    st.binary() | st.lists(PIECES).map(lambda pieces: b"HTTP/1.1 200 OK\r\n" + b"".join(pieces) + b"\r\n\r\n")
)
def test_any_answer_is_refused_or_one_response(data: bytes) -> None:
    try:
        response = parse_response_head(data, "GET")
    except Refusal as refusal:
        assert refusal.status == 502
        return
    assert client_head(response, response.framing, True).count(b"\r\n\r\n") == 1
