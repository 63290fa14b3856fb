"""What a server costs: the same users through HTTP, from a process of their own, and with the engine alone.

    python benchmarks/serving.py --shapes qwen3-4b

The engine's figures are those of `dflash-jax bench` with one block verified. Then `dflash-jax serve`'s server has the same model in
the same process, and users stream completions of the same prompts, each the next one when the last one is answered. Cycles are told
what they gain. Prompts are token ids, and texts come from a vocabulary of words that are drawn: weights are random, but texts are
made as for a model.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

TOKENS, PROMPT_TOKENS = 128, 128
END = b"\r\n0\r\n\r\n"  # of an answer in chunks


# The users: a process without JAX.


class User:
    """One connection, and what came through it: of each answer seconds to the first piece, between pieces, and its tokens."""

    def __init__(self, port: int, prompts: Iterator[list[int]]):
        self.port, self.prompts = port, prompts
        self.firsts, self.waits, self.tokens = list[float](), list[float](), 0

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for prompt in self.prompts:
            await self._ask(reader, writer, prompt)
        writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: list[int]) -> None:
        body = json.dumps({
            "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        last = sent = time.perf_counter()
        writer.write(head.encode() + body)
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n")[0]:
            raise SystemExit(f"the server said {status!r:.300} {await reader.read(300)!r}")
        # Whole events are one chunk each: what frames them stands between them.
        rest = b""
        while rest[-len(END) :] != END:
            came = await reader.read(1 << 16)
            if not came:
                raise SystemExit("the server left")
            now = time.perf_counter()
            *events, rest = (rest + came).split(b"\n\n")
            for event in events:
                data = event.partition(b"data: ")[2]
                if not data.startswith(b"{"):
                    continue
                told = json.loads(data)
                if told.get("usage"):
                    self.tokens += told["usage"]["completion_tokens"]
                if told.get("choices") and told["choices"][0]["text"]:
                    if last == sent:
                        self.firsts.append(now - sent)
                    elif now > last:
                        self.waits.append(now - last)
                    last = now


async def use(port: int, users: int, requests: int, prompts: list[list[int]]) -> dict[str, Any]:
    coming = iter([prompts[place % len(prompts)] for place in range(requests)])
    each, began = [User(port, coming) for _ in range(users)], time.perf_counter()
    await asyncio.gather(*(user.run() for user in each))
    seconds = time.perf_counter() - began
    waits = sorted(wait for user in each for wait in user.waits)
    return {
        "tokens_per_s": sum(user.tokens for user in each) / seconds,
        "first_ms": 1e3 * statistics.median(first for user in each for first in user.firsts),
        "piece_median_ms": 1e3 * statistics.median(waits),
        "piece_p99_ms": 1e3 * waits[min(len(waits) - 1, int(0.99 * len(waits)))],
    }


def users_main() -> None:
    """Takes lines of JSON, and says what the users saw in one line each."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(use(**json.loads(line)))), flush=True)


# The server and the engine.


def drawn_tokenizer(vocab: int) -> Any:
    """A tokenizer of so many tokens: bytes, and words of letters that are drawn."""
    import numpy as np
    import tokenizers

    from dflash_jax.text.tokenizer import Tokenizer

    rng, letters = np.random.default_rng(0), np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = dict.fromkeys(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < vocab:
        words["Ġ" + "".join(rng.choice(letters, rng.integers(2, 9)))] = None
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


def main() -> None:
    from record import Record, arguments

    import dflash_jax as dj
    from dflash_jax.bench import measure, programs, random_pair, synthetic
    from dflash_jax.compile.programs import start_compiling

    parser = arguments(str(__doc__))
    parser.add_argument("--shapes", help="a published shape with random weights in place of the pair")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--imposed-acceptance", type=float, default=6.0)
    parser.add_argument(
        "--dispatch",
        nargs="+",
        default=["late"],
        choices=["late", "early"],
        help="see `engine.resources.Resources`",
    )
    options = parser.parse_args()
    most = max(options.concurrency)
    load: dict[str, Any] = {"max_batch": most, "max_model_len": 2 * (PROMPT_TOKENS + TOKENS), "verify_length": None}
    model = random_pair(options.shapes, **load) if options.shapes else dj.load(**load)
    if model.tokenizer is None:
        model.tokenizer = drawn_tokenizer(model.target.vocab_size)
    engine = model.engine
    # Slots of the compared numbers of users alone, and every prompt is computed, as where the engine is measured.
    engine.buckets, engine.share_prefixes = replace(engine.buckets, batch=tuple(sorted(options.concurrency))), False
    workload = synthetic(model.target.vocab_size, PROMPT_TOKENS, max(8, most), TOKENS)
    imposed, began, jobs = options.imposed_acceptance, time.perf_counter(), []
    for users in options.concurrency:
        jobs += programs(model, workload, concurrency=users, draft=True, imposed_acceptance=imposed)
    engine.imposed_acceptance = imposed
    jobs += engine.warmup_jobs([engine.setup(mode="greedy", draft=True)], None)
    for compiled in start_compiling(jobs):
        compiled.result()
    print(f"{len(jobs)} programs in {time.perf_counter() - began:.1f} s", flush=True)
    record, alone = Record("serving", options, ["starlette", "uvicorn"]), {}
    counts = {users: users * (32 if users == 1 else 20 if users <= 8 else 8) for users in options.concurrency}
    for users in options.concurrency:
        engine.imposed_acceptance = None
        alone[users] = measure(
            model, workload, concurrency=users, requests=counts[users], draft=True, imposed_acceptance=imposed
        )
    engine.imposed_acceptance, engine.share_prefixes = imposed, False

    def ask() -> None:
        try:
            _wait_ready(port)
            for dispatch, users in itertools.product(options.dispatch, options.concurrency):
                engine.late_dispatch = dispatch != "early"
                _users(port, users, max(2, users), workload.prompts)  # everybody is served once before
                seen, engine_alone = _users(port, users, counts[users], workload.prompts), alone[users]
                case = f"serving {options.shapes or 'pair'} U{users}" + ("" if dispatch == "late" else f" {dispatch}")
                record.add(
                    case, "tokens of all users", round(seen["tokens_per_s"], 1), "tokens/s",
                    peer="the engine alone", peer_value=engine_alone.tokens_per_s,
                    ratio=round(seen["tokens_per_s"] / engine_alone.tokens_per_s, 4),
                )  # fmt: skip
                record.add(
                    case, "first token, median", round(seen["first_ms"], 3), "ms", peer="the engine alone",
                    peer_value=engine_alone.time_to_first_token_ms["p50"],
                )  # fmt: skip
                record.add(
                    case, "between pieces, p99", round(seen["piece_p99_ms"], 3), "ms",
                    over_median=round(seen["piece_p99_ms"] / seen["piece_median_ms"], 3),
                )  # fmt: skip
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    from dflash_jax.serving.app import ServeOptions
    from dflash_jax.serving.server import serve

    port = _free_port()
    asking = threading.Thread(target=ask)
    asking.start()
    serve(lambda: model, ServeOptions(names=["random"]), host="127.0.0.1", port=port, shutdown_timeout=1.0)
    asking.join()


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def _wait_ready(port: int) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit("the server is not ready after 60 s")


def _users(port: int, users: int, requests: int, prompts: Any) -> dict[str, float]:
    given = {"port": port, "users": users, "requests": requests, "prompts": [list(prompt) for prompt in prompts]}
    done = subprocess.run(
        [sys.executable, __file__, "--users-of-a-line"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    users_main() if sys.argv[1:] == ["--users-of-a-line"] else main()
