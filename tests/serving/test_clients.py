"""Clients that people have: curl, LangChain and lm-eval, where they are installed. Texts and scores are those of `generate`."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import dflash_jax as dj

pytest.importorskip("uvicorn")

PROMPT = "def area("
GREEDY = dj.SamplingParams(max_tokens=12)
# A multiple choice whose answers are one token and two, and texts up to a line's end.
QUESTIONS = [
    {"question": "def add(a, b):\n    return a +", "choices": [" b", " None"], "answer": 0},
    {"question": "import numpy as", "choices": [" os.path", " np"], "answer": 1},
    {"question": "for i in", "choices": [" range(", " def x"], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
{rest}
"""
CHOICE = "output_type: multiple_choice\ndoc_to_target: answer\ndoc_to_choice: choices\nmetric_list: [{metric: acc}]"
UNTIL = (
    'output_type: generate_until\ndoc_to_target: "{{choices[answer]}}"\nmetric_list: [{metric: exact_match}]\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 12, temperature: 0.0, do_sample: false}'
)


def curl(port, *arguments):
    found = shutil.which("curl")
    if found is None:
        pytest.skip("curl is not installed")
    command = [found, "-sN", "--max-time", "60", f"http://127.0.0.1:{port}/v1/completions", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_curl_reads_streams_and_errors(port, model):
    body = {"model": "pair", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True}
    *lines, done, end = curl(port, "-d", json.dumps(body)).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(pieces) == dj.generate(model, PROMPT, GREEDY).text
    error = json.loads(curl(port, "-d", "{"))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("the body must be JSON")


@pytest.fixture
def langchain():
    return pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


def test_langchain_answers_streams_and_structures(langchain, port, model, monkeypatch):
    options = {
        "base_url": f"http://127.0.0.1:{port}/v1", "api_key": "x", "model": "pair", "temperature": 0, "max_retries": 0,
    }  # fmt: skip
    expected = dj.generate(model, PROMPT, GREEDY, chat=True)
    chat = langchain.ChatOpenAI(**options, max_completion_tokens=12, stream_usage=True)
    answer = chat.invoke(PROMPT)
    assert answer.content == expected.text
    assert answer.usage_metadata["output_tokens"] == 12
    pieces = list(chat.stream(PROMPT))
    assert "".join(piece.content for piece in pieces) == expected.text
    assert [piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata] == [12]
    prompts = [PROMPT, "class Stack:"]
    told = [row.text for row in dj.generate(model, prompts, GREEDY)]
    assert [langchain.OpenAI(**options, max_tokens=12).invoke(prompt) for prompt in prompts] == told

    schema = {
        "title": "place",
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    monkeypatch.setattr(
        model.tokenizer, "template", "{% if tools %}{% endif %}{# <tool_call> #}" + model.tokenizer.template
    )
    long = langchain.ChatOpenAI(**options, max_completion_tokens=60)
    for method in ("json_schema", "function_calling"):
        assert long.with_structured_output(schema, method=method).invoke(PROMPT)["city"] in ("Paris", "Rome"), method


def test_lm_eval_scores_and_generates(port, model, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, rest in (("pair_choice", CHOICE), ("pair_until", UNTIL)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data, rest=rest))
    command = [
        sys.executable, "-m", "lm_eval", "--model", "local-completions", "--include_path", str(tmp_path), "--log_samples",
        "--tasks", "pair_choice,pair_until", "--output_path", str(tmp_path / "out"), "--model_args",
        f"base_url=http://127.0.0.1:{port}/v1/completions,model=pair,tokenizer_backend=remote,max_length=256,num_concurrent=2",
    ]  # fmt: skip
    env = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    samples = {
        name: [
            json.loads(line)
            for line in next((tmp_path / "out").rglob(f"samples_{name}_*.jsonl")).read_text().splitlines()
        ]
        for name in ("pair_choice", "pair_until")
    }
    assert [len(rows) for rows in samples.values()] == [3, 3]
    for row in samples["pair_choice"]:
        scores = [score(model, row["doc"]["question"], choice) for choice in row["doc"]["choices"]]
        for (told, greedy), (logprob, first) in zip(row["filtered_resps"], scores, strict=True):
            assert float(told) == pytest.approx(logprob, abs=1e-3)
            assert (str(greedy) == "True") == first
        assert row["acc"] == float(max(scores) == scores[row["doc"]["answer"]])
    params = dj.SamplingParams(max_tokens=12, stop=["\n"])
    for row in samples["pair_until"]:
        assert row["resps"] == [[dj.generate(model, row["doc"]["question"], params).text]]


def score(model, context, continuation):
    """Its log-probability after a context, and whether greedy decoding would write it."""
    encode = model.tokenizer.encode
    after = encode(context + continuation)
    (done,) = dj.generate(model, [after], dj.SamplingParams(max_tokens=1, prompt_logprobs=1))
    scores = done.prompt_logprobs[len(encode(context)) :]
    return sum(one.logprob for one in scores), all(one.token_id == one.top[0][0] for one in scores)
