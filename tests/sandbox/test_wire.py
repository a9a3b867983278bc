"""The line between owner and server, and the connections that are forwarded over it."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.kit.ports import free_port
from etude.sandbox.inside.forward import FRAMES, MAX_STREAMS, WINDOW_BYTES, Forwarder
from etude.sandbox.inside.frames import FrameError, Header, Unpacker, pack
from etude.sandbox.inside.wire import HIGH_WATER_BYTES, Wire

HEADERS = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8), max_size=3)
FRAME_LISTS = st.lists(st.tuples(HEADERS, st.binary(max_size=400)), max_size=8)


@contextmanager
def line() -> Iterator[tuple[Wire, socket.socket, select.poll]]:
    """A wire, the owner's end of it, and the poll object of the server's loop."""
    ours, theirs = socket.socketpair()
    poll = select.poll()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield Wire(theirs.fileno(), theirs.fileno(), poll), ours, poll


def drain(
    wire: Wire, owner: socket.socket, poll: select.poll, unpacker: Unpacker
) -> list[tuple[Header, bytes]]:
    """Everything that the wire has to say, read by an owner that takes odd pieces."""
    frames: list[tuple[Header, bytes]] = []
    owner.setblocking(False)
    idle = 0
    while idle < 2:
        if any(events & select.POLLOUT for _, events in poll.poll(0)):
            wire.flush()
        try:
            frames += unpacker.feed(owner.recv(977))
            idle = 0
        except BlockingIOError:
            idle += 1
    return frames


@given(FRAME_LISTS, st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_frames_arrive_whole_however_they_are_cut(
    frames: list[tuple[Header, bytes]], steps: list[int]
) -> None:
    data = b"".join(pack(header, payload) for header, payload in frames)
    got: list[tuple[Header, bytes]] = []
    with line() as (wire, owner, _):
        place = turn = 0
        while place < len(data):
            step = steps[turn % len(steps)]
            owner.sendall(data[place : place + step])
            place, turn = place + step, turn + 1
            got += wire.receive() or []
        assert wire.receive() == []
        owner.close()
        assert wire.receive() is None
    assert got == frames


def test_garbage_raises() -> None:
    with line() as (wire, owner, _):
        owner.sendall(b"\xff" * 100)
        with pytest.raises(FrameError):
            wire.receive()


@given(st.lists(st.tuples(HEADERS, st.integers(0, 60_000)), max_size=8))
@settings(deadline=None)
def test_sending_never_blocks_and_keeps_the_order(sizes: list[tuple[Header, int]]) -> None:
    frames = [(header, bytes([number]) * size) for number, (header, size) in enumerate(sizes)]
    drained: list[bool] = []
    with line() as (wire, owner, poll):
        wire.on_drained = lambda: drained.append(True)
        for header, payload in frames:
            wire.send(header, payload)
        assert drain(wire, owner, poll, Unpacker()) == frames
        assert not wire.congested
        assert len(drained) <= 1
        assert poll.poll(0) == []


def test_what_the_owner_does_not_take_is_congestion() -> None:
    with line() as (wire, owner, poll):
        unpacker = Unpacker()
        wire.send({}, bytes(HIGH_WATER_BYTES // 2))
        assert not wire.congested
        wire.send({}, bytes(HIGH_WATER_BYTES))
        assert wire.congested
        assert [len(payload) for _, payload in drain(wire, owner, poll, unpacker)] == [
            HIGH_WATER_BYTES // 2,
            HIGH_WATER_BYTES,
        ]
        assert not wire.congested


def test_a_held_line_says_nothing_until_the_next_owner_is_answered_first() -> None:
    with line() as (wire, owner, poll):
        drained: list[bool] = []
        wire.on_drained = lambda: drained.append(True)
        wire.send({"n": 0})
        wire.hold()
        for number in (1, 2):
            wire.send({"n": number}, b"x")
        unpacker = Unpacker()
        assert drain(wire, owner, poll, unpacker) == [({"n": 0}, b"")]
        wire.send({"n": 3}, bytes(HIGH_WATER_BYTES + 1))
        assert wire.congested
        wire.release({"hello": 1})
        got = drain(wire, owner, poll, unpacker)
        assert [header for header, _ in got] == [{"hello": 1}, {"n": 1}, {"n": 2}, {"n": 3}]
        assert drained == [True]
        wire.hold()
        wire.release({"hello": 2})
        assert drained == [True, True], "whoever was muted while the line was held listens again"


def test_a_descriptor_is_lent_behind_what_was_said_before() -> None:
    with line() as (wire, owner, poll):
        reader, writer = os.pipe()
        os.write(writer, b"through the lent pipe")
        wire.send({"before": 1}, b"x" * 300)
        wire.lend({"id": 7}, reader)
        data, lent, _, _ = socket.recv_fds(owner, 1 << 16, 1)
        assert Unpacker().feed(data) == [({"before": 1}, b"x" * 300), ({"id": 7}, b"")]
        assert os.read(lent[0], 100) == b"through the lent pipe"
        for descriptor in (reader, writer, *lent):
            os.close(descriptor)
        assert os.get_blocking(wire.writer) is False
        assert poll.poll(0) == []


def test_a_line_that_comes_back_begins_anew() -> None:
    drained: list[bool] = []
    with line() as (wire, owner, poll):
        wire.on_drained = lambda: drained.append(True)
        wire.send({"lost": 1}, bytes(HIGH_WATER_BYTES * 2))
        owner.sendall(pack({"half": 1})[:5])
        assert wire.receive() == []
        wire.disconnect()
        assert (wire.congested, drained) == (False, [True])
        wire.send({"kept": 1})
        assert poll.poll(0) == []
        drain(wire, owner, poll, Unpacker())
        assert wire.connected()
        owner.sendall(pack({"whole": 1}))
        assert wire.receive() == [({"whole": 1}, b"")]
        wire.flush()
        assert Unpacker().feed(owner.recv(4096)) == [({"kept": 1}, b"")]


class Server:
    """A forwarder in a server's loop, and what its owner hears."""

    def __init__(self, wire: Wire, owner: socket.socket, poll: select.poll) -> None:
        self.port = free_port()
        self.forwarder = Forwarder(wire, poll, self.port)
        self._wire, self._owner, self._poll = wire, owner, poll
        self._unpacker = Unpacker()
        self.num_refused = 0
        self.heard: list[tuple[Header, bytes]] = []
        owner.setblocking(False)

    def connect(self) -> socket.socket:
        opened = len([header for header, _ in self.heard if header["event"] == "net.open"])
        program = socket.create_connection(("127.0.0.1", self.port))
        program.setblocking(False)
        if opened < MAX_STREAMS or self.num_refused:
            self.until(lambda: len([h for h, _ in self.heard if h["event"] == "net.open"]) > opened)
        else:
            self.num_refused += 1
            self.turn()
        return program

    def turn(self) -> None:
        """Goes on until nothing more happens."""
        for _ in range(200):
            ready = self._poll.poll(1)
            if not ready:
                return
            for descriptor, events in ready:
                if descriptor == self._wire.writer:
                    if events & select.POLLOUT:
                        self._wire.flush()
                    for header, payload in (self._wire.receive() or []) if events & select.POLLIN else []:
                        assert header["op"] in FRAMES
                        self.forwarder.handle(header, payload)
                elif self.forwarder.owns(descriptor):
                    self.forwarder.on_ready(descriptor, events)
            try:
                while True:
                    self.heard += self._unpacker.feed(self._owner.recv(1 << 16))
            except BlockingIOError:
                continue
        raise AssertionError("the loop never comes to rest")

    def until(self, holds: Callable[[], bool]) -> None:
        """Goes on until a condition holds: what is sent on a busy machine takes its time to arrive."""
        end_s = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end_s, "it never comes to that"
            self.turn()

    def read(self, program: socket.socket, num_bytes: int) -> bytes:
        """What a program gets, up to `num_bytes` or the end."""
        data = bytearray()
        ended: list[bool] = []

        def come() -> bool:
            with suppress(BlockingIOError):
                piece = program.recv(num_bytes - len(data))
                data.extend(piece)
                ended.extend([True] if not piece else [])
            return len(data) == num_bytes or bool(ended)

        self.until(come)
        return bytes(data)

    def say(self, operation: str, stream: int, payload: bytes = b"", **more: int) -> None:
        frame = pack({"op": f"net.{operation}", "stream": stream, **more}, payload)
        while frame:
            with suppress(BlockingIOError):
                frame = frame[self._owner.send(frame) :]
            self.turn()

    def events(self, stream: int) -> list[str]:
        """What happened to one stream, repetitions left out."""
        kinds = [
            header["event"].removeprefix("net.") for header, _ in self.heard if header["stream"] == stream
        ]
        return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]

    def data(self, stream: int) -> bytes:
        return b"".join(data for header, data in self.heard if header["stream"] == stream)


def forwarding(scene: Callable[[Server], None]) -> None:
    with line() as (wire, owner, poll):
        for end in (owner,):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        scene(Server(wire, owner, poll))


def test_bytes_cross_in_both_directions_and_each_ends_on_its_own() -> None:
    def scene(server: Server) -> None:
        with server.connect() as program:
            program.sendall(b"question")
            program.shutdown(socket.SHUT_WR)
            server.until(lambda: server.events(1) == ["open", "data", "end"])
            assert server.data(1) == b"question"
            server.say("data", 1, b"answer")
            assert server.read(program, 6) == b"answer"
            server.say("end", 1)
            assert server.read(program, 1) == b""
            assert server.events(1) == ["open", "data", "end", "took"]
        server.say("data", 1, b"late")
        assert server.events(1)[-1] == "took"

    forwarding(scene)


def test_a_program_that_leaves_is_told_to_the_owner() -> None:
    def scene(server: Server) -> None:
        program = server.connect()
        program.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        program.close()
        server.until(lambda: server.events(1) == ["open", "close"])
        second = server.connect()
        second.close()
        server.until(lambda: server.events(2) == ["open", "end"])
        server.say("data", 2, b"x" * 100)
        server.say("data", 2, b"x" * 100)
        server.until(lambda: server.events(2)[-1] == "close")

    forwarding(scene)


def test_what_was_sent_is_delivered_before_a_close() -> None:
    def scene(server: Server) -> None:
        with server.connect() as program:
            big = os.urandom(WINDOW_BYTES)
            server.say("data", 1, big)
            server.say("close", 1)
            assert server.read(program, len(big) + 1) == big

    forwarding(scene)


def test_a_program_gets_no_further_ahead_than_the_window() -> None:
    def scene(server: Server) -> None:
        with server.connect() as program:
            sent = 0
            for _ in range(60):
                with suppress(BlockingIOError):
                    sent += program.send(bytes(1 << 16))
                server.turn()
            server.until(lambda: len(server.data(1)) == WINDOW_BYTES)
            server.turn()
            assert len(server.data(1)) == WINDOW_BYTES < sent
            server.say("took", 1, bytes=100_000)
            server.until(lambda: len(server.data(1)) == WINDOW_BYTES + 100_000)

    forwarding(scene)


def test_more_connections_than_allowed_are_closed_at_once_and_later_ones_work() -> None:
    def scene(server: Server) -> None:
        programs = [server.connect() for _ in range(MAX_STREAMS)]
        with server.connect() as refused:
            assert server.read(refused, 1) == b""
        programs.pop().close()
        server.until(lambda: server.events(MAX_STREAMS)[-1] == "end")
        server.say("close", MAX_STREAMS)
        with server.connect() as program:
            program.sendall(b"x")
            server.until(lambda: server.data(MAX_STREAMS + 1) == b"x")
        for program in programs:
            program.close()

    forwarding(scene)


def test_a_new_owner_begins_without_the_old_ones_streams() -> None:
    def scene(server: Server) -> None:
        with server.connect() as old:
            server.forwarder.drop_all()
            assert server.read(old, 1) == b""
        server.say("data", 1, b"nobody")
        with server.connect() as program:
            program.sendall(b"x")
            server.until(lambda: server.data(2) == b"x")

    forwarding(scene)


@given(st.lists(st.tuples(st.sampled_from(["in", "out"]), st.binary(min_size=1, max_size=3000)), max_size=20))
def test_any_conversation_arrives_as_it_was_said(turns: list[tuple[str, bytes]]) -> None:
    def scene(server: Server) -> None:
        with server.connect() as program:
            got, said = b"", b""
            for side, data in turns:
                if side == "in":
                    program.sendall(data)
                    said += data
                    server.until(lambda said=said: server.data(1) == said)
                else:
                    server.say("data", 1, data)
                    got += server.read(program, len(data))
            assert got == b"".join(data for side, data in turns if side == "out")

    forwarding(scene)
