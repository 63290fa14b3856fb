"""`dflash-jax bench`: what its figures are made of, prompt files, and the switch that imposes acceptance."""

import dataclasses
import inspect
import json
import os
import shutil

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.bench import Workload, measure, programs, random_pair, read_prompts, synthetic
from dflash_jax.cli.bench import check, write
from dflash_jax.cli.commands import main
from dflash_jax.cli.parser import build_parser
from dflash_jax.decoding.accept import imposed_chances
from dflash_jax.errors import ParameterError, PromptError
from dflash_jax.models.presets import DRAFTERS, TARGETS


@pytest.fixture(scope="module")
def model(target) -> dj.Model:
    return dj.load(target, max_batch=2)


@pytest.fixture(scope="module")
def workload(model) -> Workload:
    return synthetic(model.target.vocab_size - 2, 12, 5, 10)


@pytest.mark.few
def test_figures_of_a_closed_loop(model, workload) -> None:
    figures = measure(model, workload, concurrency=2, requests=5, draft=True)
    compiled = model.engine.programs.shapes()
    again = measure(model, workload, concurrency=2, requests=5, draft=True)
    assert model.engine.programs.shapes() == compiled
    assert (figures.requests, figures.concurrency, figures.prompt_tokens, figures.max_tokens) == (5, 2, 12.0, 10)
    assert figures.tokens_per_s > 0
    assert figures.compile_s > again.compile_s  # a second run only looks for its programs
    for percentiles in (figures.time_to_first_token_ms, figures.inter_token_ms):
        assert 0 < percentiles["p50"] <= percentiles["p90"] <= percentiles["p99"]
    assert figures.inter_token_ms["p99"] <= figures.longest_wait_ms
    shares = figures.acceptance_by_position
    assert len(shares) == model.draft.num_drafts
    assert all(0 <= share <= 1 for share in shares)
    # A cycle gains one token and one more for each accepted draft; what max_tokens cuts off refuses none.
    assert figures.tokens_per_cycle == pytest.approx(1 + sum(shares), rel=0.2)
    assert model.acceptance_by_position == ()
    assert figures.imposed_acceptance is None


@pytest.mark.few
def test_everything_is_compiled_before_the_first_request(model, workload) -> None:
    for job in programs(model, workload, concurrency=2, draft=True, imposed_acceptance=2.0):
        job()
    compiled = model.engine.programs.shapes()
    figures = measure(model, workload, concurrency=2, requests=5, draft=True, imposed_acceptance=2.0)
    assert figures.imposed_acceptance == 2.0
    assert model.engine.programs.shapes() == compiled
    assert model.engine.imposed_acceptance is None


@pytest.mark.few("lengths1")
@pytest.mark.parametrize("lengths", [(600,), (300, 540)])
def test_the_ends_of_long_prompts_are_compiled_too(target, tmp_path, lengths) -> None:
    for part in ("", "draft"):
        shutil.copytree(target / part, tmp_path / part, dirs_exist_ok=True)
        config = json.loads((target / part / "config.json").read_text()) | {"max_position_embeddings": 1024}
        (tmp_path / part / "config.json").write_text(json.dumps(config))
    model = dj.load(tmp_path, max_batch=2)
    prompts = tuple(synthetic(250, length, 1, 1).prompts[0] for length in lengths)
    workload = Workload("long", prompts, 4)
    for job in programs(model, workload, concurrency=2, draft=True):
        job()
    compiled = model.engine.programs.shapes()
    measure(model, workload, concurrency=2, requests=4, draft=True)
    assert model.engine.programs.shapes() == compiled


def test_without_a_drafter_every_cycle_gains_one_token(model, workload) -> None:
    figures = measure(model, workload, concurrency=1, requests=2, draft=False)
    assert (figures.tokens_per_cycle, figures.acceptance_by_position) == (1.0, [])


def test_answers_of_one_token_have_no_cycle(model, workload) -> None:
    short = dataclasses.replace(workload, max_tokens=1)
    figures = measure(model, short, concurrency=1, requests=2, draft=True)
    assert (figures.tokens_per_cycle, figures.acceptance_by_position, figures.inter_token_ms) == (0.0, [], {})


def test_acceptance_is_that_of_generate(model, workload) -> None:
    params = dj.SamplingParams(max_tokens=10, ignore_eos=True)
    lengths = [
        n for prompt in workload.prompts for n in dj.generate(model, list(prompt), params).acceptance_lengths
    ]  # greedy, so alone or side by side is the same
    figures = measure(model, workload, concurrency=2, requests=5, draft=True)
    assert figures.tokens_per_cycle == pytest.approx(np.mean(lengths), abs=1e-3)


@pytest.mark.few("2.5")
@pytest.mark.parametrize("mean", [1.0, 2.5, 4.0])
def test_imposed_acceptance_is_gained_and_marked(model, mean) -> None:
    work = synthetic(200, 12, 4, 120)
    figures = measure(model, work, concurrency=2, requests=4, draft=True, imposed_acceptance=mean)
    assert figures.imposed_acceptance == mean
    assert figures.tokens_per_cycle == pytest.approx(mean, abs=0.25)
    assert set(figures.verify_lengths) == {4}
    assert model.engine.imposed_acceptance is None


@pytest.mark.few
def test_two_imposed_acceptances_are_of_slots_by_turns(model) -> None:
    chances = imposed_chances((1.5, 3.5), 3, 5)
    np.testing.assert_array_equal(chances[2:], chances[:3])
    means = [sum(float(chance) ** k for k in range(4)) for chance in chances[:2]]
    np.testing.assert_allclose(means, [1.5, 3.5], rtol=1e-4)
    figures = measure(
        model, synthetic(200, 12, 4, 120), concurrency=2, requests=4, draft=True, imposed_acceptance=(1.0, 4.0)
    )
    assert figures.imposed_acceptance == (1.0, 4.0)
    # While the slot of one token a cycle serves one request, the other one serves three.
    assert figures.tokens_per_cycle == pytest.approx(4 * 120 / (120 + 3 * 30), abs=0.1)


def test_texts_cannot_be_made_with_imposed_acceptance(model, monkeypatch) -> None:
    monkeypatch.setattr(model.engine, "imposed_acceptance", 3.0)
    with pytest.raises(ParameterError, match="for benchmarks"):
        dj.generate(model, "ab")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 3}, "from 1 to the model's max_batch=2"),
        ({"concurrency": 2, "requests": 1}, "requests=1"),
        ({"concurrency": 1, "imposed_acceptance": 4.5}, "from 1 to 4"),
        ({"concurrency": 1, "draft": False, "imposed_acceptance": 2.0}, "from 1 to 1"),
    ],
)
def test_what_is_refused(model, workload, options, message) -> None:
    with pytest.raises(ParameterError, match=message):
        measure(model, workload, **({"requests": 4, "draft": True} | options))


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ('["a", {"prompt": "b"}]', ["a", "b"]),
        ('{"question": "a"}\n\n{"turns": ["b", "c"]}\n', ["a", "b"]),
        ('"a \\"b\\""\n"c"\n', ['a "b"', "c"]),
        ("one line\n{not json\n", ["one line", "{not json"]),
        ('"said" and done\n"quoted"\n', ['"said" and done', '"quoted"']),
        ('{"text": "a"}', ["a"]),
        ("\ufeffdef a(\r\nb\r\n", ["def a(", "b"]),
        ('{"prompt": "a\u2028b\x85c"}\n{"prompt": "d"}\n', ["a\u2028b\x85c", "d"]),
        ("a\x0cb\n", ["a\x0cb"]),
        ("42\n", ["42"]),
    ],
)
def test_prompt_files(tmp_path, text, prompts) -> None:
    (tmp_path / "prompts").write_text(text, encoding="utf-8")
    assert read_prompts(tmp_path / "prompts") == prompts


@pytest.mark.parametrize("text", ["", "[]", '[{"answer": "a"}]', "[3]"])
def test_prompt_files_that_hold_none(tmp_path, text) -> None:
    (tmp_path / "prompts").write_text(text)
    with pytest.raises(PromptError, match="prompts"):
        read_prompts(tmp_path / "prompts")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.json", '["a", "b"'),
        ("lines.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n'),
        ("mixed.jsonl", '{"prompt": "a"}\n"b"\n'),
    ],
)
def test_prompt_files_called_json_that_hold_something_else(tmp_path, name, text) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PromptError, match=f"{name} is neither a JSON list nor JSON lines"):
        read_prompts(tmp_path / name)


def test_command_prints_a_row_for_each_run_and_keeps_the_figures(target, tmp_path, capsys) -> None:
    out = tmp_path / "figures.json"
    options = ["--input-length", "9", "--output-length", "6", "--requests", "3", "--concurrency", "1", "2"]
    assert main(["bench", "--model", str(target), *options, "--json", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = json.loads(out.read_text())
    assert [(row["concurrency"], row["draft"]) for row in rows] == [(1, True), (1, False), (2, True), (2, False)]
    begins = [line.split()[:2] for line in printed[2:] if not line.lstrip().startswith("accepted drafts by position")]
    assert begins == [["1", "yes"], ["1", "no"], ["2", "yes"], ["2", "no"]]
    assert len(printed) == 2 + 4 + 2, "runs with drafts say what share of them was accepted"
    assert all(row["versions"]["jax"] and row["device"] and row["model"] == str(target) for row in rows)
    assert list(tmp_path.iterdir()) == [out]


def test_figures_go_where_a_link_leads_and_into_what_is_no_file(tmp_path, capsys) -> None:
    """A file in place of `/dev/null` would break the machine of who runs this as root."""
    kept, link, pipe = tmp_path / "kept.json", tmp_path / "latest.json", tmp_path / "pipe"
    link.symlink_to(kept)
    write(str(link), [{"a": 1}])
    assert (link.is_symlink(), json.loads(kept.read_text())) == (True, [{"a": 1}])
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(str(pipe), [{"a": 2}])
    assert (pipe.is_fifo(), json.loads(os.read(reader, 999))) == (True, [{"a": 2}])
    os.close(reader)
    write("/dev/stdout", [{"a": 3}])
    assert json.loads(capsys.readouterr().out) == [{"a": 3}]
    assert sorted(tmp_path.iterdir()) == [kept, link, pipe]


def test_a_place_that_takes_figures_may_lie_in_a_folder_that_does_not(monkeypatch, tmp_path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "figures.json")
    monkeypatch.setattr("os.access", lambda path, mode: str(path) == "/dev/null")
    parser = build_parser()
    check(parser.parse_args(["bench", "--json", "/dev/null"]))
    for name in ("link", "figures.json"):
        with pytest.raises(ParameterError, match=f"{name}: its folder does not exist or cannot be written to"):
            check(parser.parse_args(["bench", "--json", str(tmp_path / name)]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--imposed-acceptance", "3"], "name --shapes"),
        (["--shapes", "qwen3-4b", "--model", "x"], "leave --model out"),
        (["--shapes", "qwen3-4b", "--draft", "x", "--weight-dtype", "int8"], "leave --draft, --weight-dtype out"),
        (["--shapes", "qwen3-4b", "--cache-dtype", "fp8"], "leave --cache-dtype out"),
        (["--shapes", "qwen3-4b", "--calibration", "texts"], "leave --calibration out"),
        (["--shapes", "qwen3-4b", "--revision", "main"], "leave --revision out"),
        (["--chat-option", "enable_thinking=false"], "add --chat"),
        (["--shapes", "qwen3-4b", "--imposed-acceptance", "3", "--no-draft"], "leave --no-draft out"),
        (["--shapes", "qwen3-4b", "--prompts", "texts"], "say --input-length"),
    ],
)
def test_command_refuses(options, said, capsys) -> None:
    assert main(["bench", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--requests", "3", "--concurrency", "1", "4"], "--requests 3 is fewer than --concurrency 4"),
        (["--input-length", "-3"], "--input-length must be at least 1, got -3"),
        (["--concurrency", "2", "0"], "--concurrency must be at least 1, got 0"),
        (["--json", "/nowhere/figures.json"], "--json /nowhere/figures.json: its folder does not exist"),
        (["--json", "/tmp"], "--json /tmp is a folder"),
        (["--chat"], "name --prompts"),
        (["--temperature", "-1"], "temperature must be a number from 0.0"),
        (["--prompts", "/no/such/file"], "/no/such/file cannot be read"),
    ],
)
def test_what_makes_no_run_is_refused_before_a_model_is_loaded(options, said, capsys) -> None:
    assert main(["bench", "--model", "/no/such/model", *options]) == (4 if "/no/such/file" in options else 2)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shapes", "qwen3-5b"], "no shape is called 'qwen3-5b'"),
        (["--shapes", "qwen3-4b", "--imposed-acceptance", "17"], "imposed acceptance must be from 1 to 16, got 17"),
        (["--shapes", "qwen3-4b", "--imposed-acceptance", "nan"], "imposed acceptance must be from 1 to 16, got nan"),
        (
            ["--shapes", "qwen3-4b", "--input-length", "600", "--max-model-len", "700"],
            "are 728 tokens together, --max-model-len is 700",
        ),
    ],
)
def test_shapes_are_refused_before_they_are_filled(options, said, capsys, monkeypatch) -> None:
    monkeypatch.setattr("dflash_jax.cli.bench.random_pair", None)
    assert main(["bench", *options]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "filling" not in told


def test_random_prompts_are_given_room_before_weights_are_read(target, capsys, monkeypatch) -> None:
    lengths = []

    def load(path, **options):
        lengths.append(options["max_model_len"])
        raise ParameterError("so far")

    limit = dj.load(target, max_batch=1).target.max_position
    monkeypatch.setattr("dflash_jax.cli.bench.load", load)
    monkeypatch.setattr("dflash_jax.engine.planning.DEFAULT_MODEL_LEN", limit // 2)
    few, many = ["--output-length", "3"], ["--input-length", str(limit - 3)]
    for options in ([*few, "--input-length", "5"], [*few, *many], [*few, *many, "--max-model-len", str(limit)]):
        assert main(["bench", "--model", str(target), *options]) == 2
    assert lengths == [limit // 2, limit, limit]
    capsys.readouterr()
    for options, said in (([], f"the model takes {limit}"), (["--max-model-len", "9"], "--max-model-len is 9")):
        assert main(["bench", "--model", str(target), *many, "--output-length", "4", *options]) == 2
        assert (
            f"--input-length {limit - 3} and --output-length 4 are {limit + 1} tokens together, {said}"
            in capsys.readouterr().err
        )
    assert len(lengths) == 3


@pytest.mark.few
def test_command_without_drafting(target, capsys) -> None:
    options = ["--input-length", "5", "--output-length", "4", "--requests", "2", "--no-draft"]
    assert main(["bench", "--model", str(target), *options]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]] == [["1", "no"]]


@pytest.mark.few
def test_a_published_shape_with_random_weights(monkeypatch) -> None:
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
        "vocab_size": 300, "windows": (None, None),
    }  # fmt: skip
    draft = {
        "causal": (False, False), "target_hidden_size": 32, "mask_token_id": 299, "target_layer_ids": (0, 1),
        "num_target_layers": 2,
    }  # fmt: skip
    tables = {"TARGETS": (TARGETS, "Qwen3-4B", {}), "DRAFTERS": (DRAFTERS, "Qwen3-4B-DFlash-b16", draft)}
    for name, (table, key, extra) in tables.items():
        config = dataclasses.replace(table[key], **small, **extra)
        monkeypatch.setattr(f"dflash_jax.bench.workload.{name}", {key: config})
    model = random_pair("qwen3-4b", max_model_len=64, max_batch=1, dtype="float32", draft_window=16)
    assert model.engine.draft_window == 16
    work = synthetic(200, 8, 1, 12)
    figures = measure(model, work, concurrency=1, requests=1, draft=True, imposed_acceptance=6.0)
    assert figures.tokens_per_cycle > 2
    with pytest.raises(ParameterError, match="known: qwen3-4b"):
        random_pair("qwen3-1t", max_model_len=64, max_batch=1)
    with pytest.raises(ParameterError, match="random weights and their pages are made here: leave cache_dtype out"):
        random_pair("qwen3-4b", cache_dtype="fp8")
    assert random_pair("qwen3-4b", max_model_len=64, max_batch=1, num_pages=3, proposals="argmax").engine.num_pages == 3


def test_a_shape_by_name_takes_what_the_command_gives():
    """`draft` among it, which `load` has an option of, None where nothing is said."""
    from dflash_jax.bench.workload import published_shape, random_model

    given = inspect.signature(random_model).bind("qwen3-4b", *published_shape("qwen3-4b"), draft=None, max_batch=2)
    assert given.kwargs == {"draft": None, "max_batch": 2}
