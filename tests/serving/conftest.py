"""The pair that ships, with a chat template, and a server of it."""

import threading
import time

import pytest

import dflash_jax as dj

from ..chat_pair import chat_pair


@pytest.fixture(scope="session")
def model() -> dj.Model:
    return chat_pair()


@pytest.fixture(scope="module")
def app(model):
    pytest.importorskip("starlette")
    from dflash_jax.serving.app import ServeOptions, make_app

    return make_app(model, ServeOptions(names=("pair", "a/b"), max_queue=64, max_body_bytes=1 << 16))


@pytest.fixture(scope="module")
def port(app):
    """Of a server in a thread, which installs no handlers of signals there."""
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(20)
