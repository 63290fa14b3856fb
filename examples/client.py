"""A client of `dflash-jax serve`: a whole answer, a streamed one, and several questions at once.

    dflash-jax serve &                      # the pair that ships, at http://127.0.0.1:8000/v1
    python examples/client.py "def quicksort("
    python examples/client.py "def quicksort(" --url http://127.0.0.1:8000/v1 --max-tokens 64
    python examples/client.py "import json" --choice "yes" "no"

It needs OpenAI's package alone (`pip install openai`), and runs anywhere.
"""

import argparse
import asyncio
from collections.abc import Sequence

from openai import AsyncOpenAI, OpenAI


def stream(url: str, prompt: str, max_tokens: int) -> str:
    """Prints an answer as it comes."""
    text = ""
    with OpenAI(base_url=url, api_key="none") as client:
        model = client.models.list().data[0].id
        for chunk in client.completions.create(
            model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
        ):
            text += chunk.choices[0].text
            print(chunk.choices[0].text, end="", flush=True)
    print()
    return text


async def several(url: str, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """Answers of questions that are asked at once: the server runs them in one batch."""
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        model = (await client.models.list()).data[0].id

        async def ask(prompt: str) -> str:
            answer = await client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, temperature=0)
            return answer.choices[0].text

        return await asyncio.gather(*map(ask, prompts))


def choose(url: str, prompt: str, choices: Sequence[str]) -> str:
    """One of a few answers. The server needs its extra `structured` for that."""
    with OpenAI(base_url=url, api_key="none") as client:
        model = client.models.list().data[0].id
        wanted = {"structured_outputs": {"choice": list(choices)}}
        return client.completions.create(model=model, prompt=prompt, max_tokens=64, extra_body=wanted).choices[0].text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A client of dflash-jax serve.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--choice", nargs="+", metavar="TEXT", help="the answers that there are")
    args = parser.parse_args(arguments)
    if args.choice:
        for prompt in args.prompts:
            print(choose(args.url, prompt, args.choice))
    elif len(args.prompts) == 1:
        stream(args.url, args.prompts[0], args.max_tokens)
    else:
        for prompt, text in zip(
            args.prompts, asyncio.run(several(args.url, args.prompts, args.max_tokens)), strict=True
        ):
            print(f"--- {prompt}\n{text}")


if __name__ == "__main__":
    main()
