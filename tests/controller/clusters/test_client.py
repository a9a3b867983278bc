"""The client of the control API, against a server with arbitrary answers."""

import asyncio

from etude.controller.clusters.client import ControlClient

MANY = 100


def test_sessions_on_their_way_hold_no_sign_of_life_back() -> None:
    async def run() -> None:
        num_sent, all_sent = 0, asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_sent
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"PUT"):
                num_sent += 1
                if num_sent == MANY:
                    all_sent.set()
                await reader.read()  # to the end of the connection: a session is taken in slowly
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, ControlClient(f"http://{host}:{port}", None) as client, asyncio.timeout(60.0):
            sending = [asyncio.create_task(client.send("member", f"{n}", b"data")) for n in range(MANY)]
            await all_sent.wait()
            assert await client.beat("member", None, {}, "", within_s=30.0) == {}
            for one in sending:
                one.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    asyncio.run(run())
