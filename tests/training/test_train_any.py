"""`dflash-jax train` on the target that ships, cut small: data, what is refused, resuming, and a drafter that loads."""

import json
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.checkpoints.pair import shipped_pair
from dflash_jax.cli import main
from dflash_jax.errors import DFlashError, ParameterError, PromptError
from dflash_jax.models import DFlashConfig, Qwen3Config, family_of
from dflash_jax.models.dflash import dflash_parameters
from dflash_jax.training.answers import Answer, fitting, read_rows
from dflash_jax.training.curve import curve_svg
from dflash_jax.training.fit import answer_anchors, answer_arrays
from dflash_jax.training.fit_settings import FitSettings, default_taps, drafter_config
from dflash_jax.training.stages import restore, save
from dflash_jax.training.train_any import drafter_json

TARGET = Qwen3Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=9, num_heads=2, num_kv_heads=1, head_dim=16,
    tie_embeddings=True,
)  # fmt: skip
SMALL = [
    "--length",
    "32",
    "--rows",
    "2",
    "--anchors",
    "2",
    "--layers",
    "1",
    "--block-size",
    "4",
    "--head-rank",
    "8",
    "--taps",
    "1,2",
]


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_form_of_a_line_is_read(tmp_path):
    rows = read_rows(
        lines(
            tmp_path / "data.jsonl",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"question": "a", "answer": "b"},
            {"text": "b"},
            {"prompt": "a"},
        )
    )
    assert [row.answer for row in rows] == ["b", "b", "b", "b", None]
    assert rows[1].prompt == rows[0].prompt == [{"role": "user", "content": "a"}]
    assert [row.prompt for row in rows[2:]] == ["a", "", "a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no line"),
        ("{'a': 1}\n", "line 1 is no JSON"),
        ("\n[1]\n", "line 2 must be an object"),
        ('{"title": "a"}\n', "its keys are title"),
        ('{"messages": [{"role": "user"}]}\n', "each message must have texts as role and content"),
        ('{"messages": []}\n', "must begin with a message"),
    ],
)
def test_lines_that_are_of_no_form_are_named(tmp_path, text, said):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=said):
        read_rows(path)


def test_answers_are_cut_to_the_length_and_to_the_vocabulary():
    answers = [Answer((1, 2, 3, 4, 5), 1), Answer((1, 2, 3, 4, 5), 3)]
    assert [one.ids for one in fitting(answers, 4, 8)] == [(1, 2, 3, 4)]
    with pytest.raises(PromptError, match="another model's tokenizer"):
        fitting(answers, 4, 5)
    with pytest.raises(PromptError, match="none of 2 rows"):
        fitting(answers, 2, 8)


def test_anchors_have_a_token_of_the_answer_behind_them():
    _, *ends = answer_arrays([Answer((1,) * 9, 3), Answer((1,) * 5, 3), Answer((1,) * 40, 20)], 40)
    start, end = map(jnp.asarray, ends)
    anchors = np.asarray(answer_anchors(jax.random.key(0), start, end, 6))
    assert (anchors >= start[:, None]).all()
    assert (anchors <= end[:, None] - 2).all()
    assert (np.diff(anchors, axis=1) >= 0).all()


@pytest.mark.parametrize("kind", ["v1", "dflash2", "dspark"])
def test_a_drafter_s_file_reads_back(kind):
    config = drafter_config(TARGET, FitSettings(kind=kind, block_size=5, layers=2))
    names = [source.name for parameter in dflash_parameters(config) for source in parameter.sources]
    read = family_of(drafter_json(config)).config(drafter_json(config), names)
    assert isinstance(read, DFlashConfig)
    assert read == config


def test_default_taps():
    assert default_taps(36) == (1, 9, 17, 25, 33)
    assert default_taps(4) == (0, 1, 2, 3)
    assert default_taps(6) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"taps": (1, 9)}, "taps must be layers"),
        ({"mask_id": 64}, "mask_id must be a token"),
        ({"kind": "dflash3"}, "kind must be"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(ParameterError, match=said):
        drafter_config(TARGET, FitSettings(**changes))


def test_a_curve_is_a_picture():
    from xml.etree import ElementTree

    root = ElementTree.fromstring(curve_svg("<loss>", [10, 20], [2.0, 1.0]))
    assert "64.0" not in root.attrib
    assert any(part.text == "<loss>" for part in root)


@pytest.mark.few
def test_a_drafter_is_trained_in_two_parts_and_loads(tmp_path, capsys):
    """Answers by the target, twenty steps, stopped in between; what comes out drafts for the target that ships."""
    target = str(shipped_pair() / "target")
    data = lines(tmp_path / "data.jsonl", *({"prompt": f"def f{i}(a, b):\n    return a"} for i in range(4)))
    out = tmp_path / "drafter"
    words = [
        "train",
        "--data",
        str(data),
        "--output",
        str(out),
        *SMALL,
        "--steps",
        "40",
        "--regenerate",
        "--max-tokens",
        "12",
    ]
    assert main([*words, "--stop-after", "0.01"]) == 75
    assert not out.exists()
    assert main([*words, "--evaluation-tokens", "8"]) == 0
    said = capsys.readouterr()
    assert "tokens per cycle on held-out prompts" in said.out
    history = json.loads((out / "training.json").read_text())
    assert [row["step"] for row in history] == [20, 40]
    assert history[-1]["accept"] > history[0]["accept"]
    assert {path.name for path in out.iterdir()} == {
        "config.json", "model.safetensors", "README.md", "evaluation.json", "training.json", "loss.svg",
    }  # fmt: skip
    model = dj.load(target, draft=out, dtype="float32", max_model_len=64, max_batch=1)
    params = dj.SamplingParams(max_tokens=12)
    drafted, plain = (dj.generate(model, "def add(a, b):", params, draft=draft) for draft in (True, False))
    assert drafted.token_ids == plain.token_ids

    assert main(words) == 2
    assert main([*words[:3], *["--output", str(tmp_path / "other"), "--work", f"{out}.work"], *SMALL]) == 2
    drafter = ["train", "--target", str(out), "--data", str(data), "--output", str(tmp_path / "other")]
    assert main(drafter) == 3
    assert main(["train", "--data", str(data), "--output", str(tmp_path / "other")]) == 4
    said = capsys.readouterr().err
    assert "is there already" in said
    assert "holds a run with other settings" in said
    assert "it is a drafter" in said
    assert "has no answer: add --regenerate" in said


def test_places_that_cannot_be(tmp_path, capsys):
    data, kept = tmp_path / "data.jsonl", tmp_path / "kept"
    kept.write_text("")
    words = ["train", "--data", str(data), "--output"]
    assert main([*words, str(tmp_path / "out"), "--work", str(kept)]) == 2
    assert "kept is a file: name another folder with --work" in capsys.readouterr().err
    assert main([*words, str(kept / "out"), "--work", str(tmp_path / "work")]) == 2
    assert "kept is a file: name another folder with --output" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
    assert main([*words, str(tmp_path / "out"), "--layers", "99999999999999999999"]) == 2
    assert "layers must be at most 1024" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, ""])
    assert "argument --output: an empty path was given" in capsys.readouterr().err


def test_a_run_that_never_began_binds_nobody(tmp_path, capsys):
    """A file that is not there, a wrong number: the corrected command is taken, in the same work folder."""
    out, data = tmp_path / "drafter", tmp_path / "data.jsonl"
    words = ["train", "--data", str(data), "--output", str(out), *SMALL]
    assert main(words) == 4
    assert "cannot be read" in capsys.readouterr().err
    data.write_text("".join(json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n"}) + "\n" for i in range(3)))
    assert main([*words, "--steps", "7", "--evaluation-tokens", "0"]) == 0
    assert json.loads((tmp_path / "drafter.work" / "task.json").read_text())["settings"]["steps"] == 7


def test_files_that_cannot_be_read(tmp_path, capsys):
    """Each is named with what to do; a byte order mark is no fault."""
    data = tmp_path / "data.jsonl"
    words = ["train", "--data", str(data), "--output", str(tmp_path / "drafter"), *SMALL, "--steps", "1"]
    data.write_bytes(b"{}\xff")
    assert main(words) == 4
    assert "data.jsonl is not UTF-8 (its byte 2 is 0xff): save it as UTF-8" in capsys.readouterr().err
    data.write_text("".join(json.dumps({"text": f"x = {i}\n"}) + "\n" for i in range(3)), "utf-8-sig")
    assert len(read_rows(data)) == 3
    (tmp_path / "drafter.work" / "task.json").write_text("{")
    assert main(words) == 2
    assert "task.json is not the JSON that a run keeps there" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_fit(tmp_path):
    """A disk that is full ends a run with a sentence. What was saved before stays, and nothing of the new one does."""
    save(tmp_path, 1, {"weight": jnp.zeros(8)})
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        with pytest.raises(DFlashError, match=r"cannot hold the checkpoint of step 2 .*: make room there"):
            save(tmp_path, 2, {"weight": jax.random.normal(jax.random.key(0), (100_000,))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert (restore(tmp_path, 1, {"weight": jnp.ones(8)})["weight"] == 0).all()
