"""The command `dflash-jax serve`: options of the command line to those of the server."""

import argparse
import os
import sys
from typing import Any

from dflash_jax.cli.terminal import note
from dflash_jax.compile.device import local_device
from dflash_jax.engine.requests import MODES
from dflash_jax.errors import ParameterError, TokenizerError
from dflash_jax.model import Model, load
from dflash_jax.serving.app import ServeOptions
from dflash_jax.serving.server import serve
from dflash_jax.text.grammars import installed
from dflash_jax.text.tokenizer import read_template

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_model(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Loads, warms up and serves until it is told to end."""
    from_environment = os.environ.get("DFLASH_JAX_API_KEY")
    keys = args.api_key or ([from_environment] if from_environment else [])
    if not all(key.strip() for key in keys):
        raise ParameterError("--api-key must not be empty: give a key, or leave it out")
    if not all(name.strip() for name in args.served_model_name or ()):
        raise ParameterError("--served-model-name must not be empty: give a name, or leave it out")
    here = args.host in LOOPBACK
    if not here and not keys:
        note(f"{args.host} is not this machine alone, and no key is needed: give --api-key")
    if args.default_max_tokens is not None and args.default_max_tokens < 1:
        raise ParameterError(f"--default-max-tokens must be at least 1, got {args.default_max_tokens}")
    template = None if args.chat_template is None else read_template(args.chat_template)
    names = args.served_model_name or [args.model or "dflash-pair"]
    served = ServeOptions(
        names=names, keys=keys, max_queue=args.max_queue, max_body_bytes=int(args.max_body_mb * 2**20),
        request_timeout=args.request_timeout, origins=args.allowed_origins, here=here, metrics=not args.no_metrics,
        model_defaults=args.generation_config == "auto", tool_parser=args.tool_parser, reasoning_parser=args.reasoning_parser,
        default_max_tokens=args.default_max_tokens, request_metrics=args.request_metrics,
    )  # fmt: skip

    def loaded() -> Model:
        model = load(args.model, **options)
        model.tell = note
        for notice in model.notices:
            note(notice)
        if template is not None:
            if model.tokenizer is None:
                raise TokenizerError(f"{model.name} has no tokenizer.json: --chat-template is of no use to it")
            model.tokenizer.template, model.tokenizer.tool_template = template, None
        if not args.no_warmup:
            _warm_up(model)
        return model

    address = ""

    def opened(port: int) -> None:
        nonlocal address
        address = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{port}"
        note(f"{address}/ready answers 503 while the model is loaded and its programs are compiled")

    serve(
        loaded, served, host=args.host, port=args.port, shutdown_timeout=args.shutdown_timeout, root_path=args.root_path,
        access_log=args.access_log, opened=opened, ready=lambda model: note(f"{model!r} is served at {address}/v1"),
    )  # fmt: skip


def _warm_up(model: Model) -> None:
    """Compiles what requests will need; on a CPU what one at a time will, as all of it takes longer than anybody waits."""
    shown, drafts = sys.stderr.isatty(), (model.draft is not None,)
    if local_device().platform == "cpu":
        note("on a CPU only programs for one request at a time are compiled ahead, others when they are first needed")
        model.warmup(modes=("greedy", "sampled"), draft=drafts, batch=(1,), progress=shown)
        return
    # Nobody can ask for grammars without llguidance, nor have the host asked where several GPUs share a model.
    last = "structured" if installed() and model.engine.tp == 1 else "regular" if installed() else "adjusted"
    model.warmup(modes=MODES[: MODES.index(last) + 1], draft=drafts, progress=shown)
