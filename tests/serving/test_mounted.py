"""The application in another one, and behind a proxy."""

import pytest

from dflash_jax.cli.commands import USAGE, main

TestClient = pytest.importorskip("starlette.testclient").TestClient


def test_a_key_is_needed_under_any_path() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    from dflash_jax.serving.app import ServeOptions, make_app

    inner = make_app(None, ServeOptions(keys=("secret",)))
    client = TestClient(Starlette(routes=[Mount("/a", app=Starlette(routes=[Mount("/b", app=inner)]))]))
    key = {"Authorization": "Bearer secret"}
    for path in ("/v1/models", "/tokenizer_info"):
        assert client.get(f"/a/b{path}").status_code == 401
        assert client.get(f"/a/b{path}", headers=key).status_code == 503  # no model is there yet
    assert client.get("/a/b/version").status_code == 200
    # As uvicorn tells of `--root-path /a`: it puts that before the path that it was asked for.
    assert TestClient(inner, root_path="/a").get("/a/v1/models").status_code == 401
    assert TestClient(inner, root_path="/proxy").get("/v1/models").status_code == 401


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-key", key]) == USAGE
    assert "--api-key must not be empty" in capsys.readouterr().err
    assert main(["serve", "--served-model-name", "pair", key]) == USAGE
    assert "--served-model-name must not be empty" in capsys.readouterr().err
