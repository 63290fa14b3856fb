"""The pair that ships, with a chat template."""

import pytest

import dflash_jax as dj

from ..chat_pair import chat_pair


@pytest.fixture(scope="session")
def model() -> dj.Model:
    return chat_pair()
