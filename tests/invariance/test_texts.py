"""On a GPU in bfloat16: `exact` texts of the pair that ships, whatever is drafted and whoever is served beside it."""

import json
from pathlib import Path

import pytest

import dflash_jax as dj

PROMPTS = Path(__file__).parent.parent / "data" / "heldout_prompts.json"
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[1, 8, 32])
def model(request: pytest.FixtureRequest) -> dj.Model:
    return dj.load(exact=True, dtype="bfloat16", max_batch=request.param, max_model_len=512)


def params(sampled: bool, index: int) -> dj.SamplingParams:
    law = {"temperature": 0.8, "top_p": (1.0, 0.9)[index % 2], "seed": index} if sampled else {}
    return dj.SamplingParams(max_tokens=128, ignore_eos=True, **law)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_texts_are_their_requests_own(model: dj.Model, sampled: bool) -> None:
    """The second and third runs find the prompts' pages."""
    prompts = [row["text"] for row in json.loads(PROMPTS.read_text())]
    each = [params(sampled, index) for index in range(len(prompts))]
    drafted = [row.token_ids for row in dj.generate(model, prompts, each)]
    assert [row.token_ids for row in dj.generate(model, prompts, each, draft=False)] == drafted
    assert [dj.generate(model, *one).token_ids for one in zip(prompts, each, strict=True)] == drafted
