"""A conversation at the terminal in thirty lines; `dflash-jax chat` is the one with commands and sessions.

    python examples/chat_loop.py Qwen/Qwen3-4B

An empty line ends it. Ctrl-C stops an answer, whose beginning stays in the conversation.
"""

import sys
from collections.abc import Sequence

import dflash_jax as dj


def main(arguments: Sequence[str] | None = None) -> dj.Chat:
    name, *options = sys.argv[1:] if arguments is None else arguments
    model = dj.load(name)
    # Templates that think ask for this name.
    asks = "enable_thinking" in ((model.tokenizer and model.tokenizer.template) or "")
    chat = dj.Chat(
        model,
        dj.SamplingParams(max_tokens=int(options[0]) if options else 1024),
        chat_options={"enable_thinking": False} if asks else None,
    )
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
