"""A service of one's own around a model: texts come in over TCP, a line each, and go on as they are made.

    python examples/async_service.py --port 9000
    printf 'def quicksort(\n' | nc 127.0.0.1 9000

All connections share one batch. One that is closed ends its request, and its pages are free for others.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress

import dflash_jax as dj


class Service:
    """Answers lines with a model.

    Args:
      engine: shared by all connections.
    """

    def __init__(self, engine: dj.AsyncEngine, max_tokens: int):
        self.engine, self.params = engine, dj.SamplingParams(max_tokens=max_tokens)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with suppress(ConnectionError):
            while line := (await reader.readline()).decode("utf-8", "replace").rstrip("\n"):
                try:
                    async with aclosing(self.engine.stream(line, self.params)) as pieces:
                        async for piece in pieces:
                            writer.write(piece.text.encode())
                            await writer.drain()  # a slow reader gets what has come meanwhile at once
                except dj.DFlashError as error:
                    writer.write(f"error: {error}".encode())
                writer.write(b"\0")  # ends an answer
                await writer.drain()
        writer.close()


async def serve(model: dj.Model, port: int, max_tokens: int, ready: asyncio.Future[int] | None = None) -> None:
    """Serves until it is cancelled. `ready` gets the port."""
    async with dj.AsyncEngine(model) as engine:
        server = await asyncio.start_server(Service(engine, max_tokens).answer, "127.0.0.1", port)
        async with server:
            bound = server.sockets[0].getsockname()[1]
            print(f"listening at 127.0.0.1:{bound}", flush=True)
            if ready is not None:
                ready.set_result(bound)
            await server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A model behind a port.")
    parser.add_argument("--model", help="(default: the pair that ships)")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args(arguments)
    model = dj.load(args.model)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(model, args.port, args.max_tokens))


if __name__ == "__main__":
    main()
