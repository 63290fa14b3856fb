"""A conversation at the terminal in thirty lines; `dflash-jax chat` is the one with commands and sessions.

    python examples/chat_loop.py Qwen/Qwen3-4B

An empty line or Ctrl-D ends it. Ctrl-C stops an answer, whose beginning stays in the conversation.
"""

import argparse
from collections.abc import Sequence
from contextlib import suppress

import dflash_jax as dj


def main(arguments: Sequence[str] | None = None) -> dj.Chat:
    parser = argparse.ArgumentParser(description="A conversation at the terminal.")
    parser.add_argument("model", help="a folder or owner/name on the hub, with a chat template")
    parser.add_argument("--max-tokens", type=int, default=1024)
    args = parser.parse_args(arguments)
    model = dj.load(args.model)
    # Templates that think ask for this name.
    asks = "enable_thinking" in ((model.tokenizer and model.tokenizer.template) or "")
    chat = dj.Chat(
        model,
        dj.SamplingParams(max_tokens=args.max_tokens),
        chat_options={"enable_thinking": False} if asks else None,
    )
    with suppress(EOFError):
        while text := input("you: ").strip():
            try:
                for piece in chat.stream(text):
                    print(piece.text, end="", flush=True)
            except KeyboardInterrupt:
                print(" ...", end="")
            except dj.CapacityError:
                print("(the conversation is full; it begins anew)", end="")
                chat.reset()
            print()
    return chat


if __name__ == "__main__":
    main()
