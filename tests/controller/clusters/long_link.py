"""The far end of a long link: forwards connections, with the link's latency and loss added.

python -m tests.controller.clusters.long_link --delay-ms 40 --loss 0.01 --seed 1 8680:10.8.0.1:8680 ...

Each direction is late by `--delay-ms`. A segment of 1,448 bytes is lost with the probability `--loss`: it
comes a round trip later, as after a fast retransmission, and everything behind it on its connection waits, as
TCP has it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random

SEGMENT_BYTES = 1448
_READ_BYTES = 64 * SEGMENT_BYTES
_HELD = 64
"""Pieces on their way in one direction of a connection; a sender waits beyond them."""


class LongLink:
    """Forwards connections. For one event loop."""

    def __init__(self, delay_s: float, loss: float, seed: int) -> None:
        self.lost_segments = 0
        self._delay_s = delay_s
        self._loss = loss
        self._dice = random.Random(seed)

    async def forward(self, port: int, host: str, to_port: int) -> None:
        """Takes connections on a port of loopback, for ever."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(host, to_port)
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(self._carry(reader, far_writer))
                        both.create_task(self._carry(far_reader, writer))
                except* OSError:
                    pass  # one end is gone: so is the connection
                finally:
                    far_writer.close()
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", port)
        await server.serve_forever()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: what was read comes out once it is due, in order."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD)
        clock = asyncio.get_running_loop().time

        async def read() -> None:
            due_s = 0.0
            while True:
                data = await reader.read(_READ_BYTES)
                due_s = max(due_s, clock() + self._delay_s) + self._late_s(len(data))
                await pieces.put((due_s, data))
                if not data:
                    return

        async def write() -> None:
            while True:
                due_s, data = await pieces.get()
                await asyncio.sleep(max(0.0, due_s - clock()))
                if not data:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as both:
            both.create_task(read())
            both.create_task(write())

    def _late_s(self, num_bytes: int) -> float:
        """What retransmissions add: segments that are lost together are sent again together."""
        segments = -(-num_bytes // SEGMENT_BYTES)
        lost = sum(self._dice.random() < self._loss for _ in range(segments))
        self.lost_segments += lost
        return 2 * self._delay_s if lost else 0.0


async def _forward_all(link: LongLink, ways: list[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for way in ways:
            port, host, to_port = way.split(":")
            group.create_task(link.forward(int(port), host, int(to_port)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=40.0)
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("ways", nargs="+", metavar="PORT:HOST:PORT")
    arguments = parser.parse_args()
    link = LongLink(arguments.delay_ms / 1e3, arguments.loss, arguments.seed)
    asyncio.run(_forward_all(link, arguments.ways))


if __name__ == "__main__":
    main()
