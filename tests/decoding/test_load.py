"""`load`: which drafter is taken, what must fit, and what a folder without a tokenizer can still do."""

import inspect
import io
import json
import re
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dflash_convert.cli import main as dflash_convert
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.checkpoints.hub import resolve_source
from dflash_jax.checkpoints.opening import open_checkpoint
from dflash_jax.engine.memory import size
from dflash_jax.models import family_of, to_huggingface

TARGET = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 97, "hidden_size": 40, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
    "max_position_embeddings": 128, "eos_token_id": [3, 4],
}  # fmt: skip
DRAFT = {
    **{key: TARGET[key] for key in TARGET if key not in ("eos_token_id", "tie_word_embeddings")},
    "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 4, "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]},
}  # fmt: skip


def write(folder, config, seed=0, dtype=np.float32):
    """A Hugging Face folder with random weights."""
    folder.mkdir(parents=True)
    family = family_of(config)
    table = family.parameters(family.config(config))
    rng = np.random.default_rng(seed)
    params = {row.name: (rng.normal(size=row.shape) * 0.3).astype(dtype) for row in table}
    tensors = {name: np.ascontiguousarray(array) for name, array in to_huggingface(table, params).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def target(tmp_path):
    return write(tmp_path / "target", TARGET)


PARAMS = dj.SamplingParams(max_tokens=9)


def test_norms_in_another_type_do_not_decide_for_the_model(tmp_path, monkeypatch):
    """As fine-tuning with matrices in few bits leaves them. On a GPU the stored type counts, and pages would be of the norms'."""
    monkeypatch.setattr("dflash_jax.engine.planning.choose_dtype", lambda dtype: dtype)
    folder = write(tmp_path / "mixed", TARGET, dtype=ml_dtypes.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    norms = {name: value.astype(np.float32) for name, value in tensors.items() if value.ndim == 1}
    save_file(tensors | norms, folder / "model.safetensors")
    model = dj.load(folder, max_batch=1)
    assert str(model.engine.dtype) == "bfloat16"
    assert {str(array.dtype) for array in model.engine.weights["target"].values()} == {"bfloat16"}
    assert "13 of 26 arrays are not stored in bfloat16; a model has all in one type" in model.notices
    assert dflash_convert(["--quiet", str(folder), "--output", str(tmp_path / "out")]) == 0
    converted = open_checkpoint(tmp_path / "out")
    assert converted.dtype == "bfloat16"
    assert converted.load()["norm.weight"].dtype == jnp.float32
    assert len(dj.generate(model, [5, 6, 7], PARAMS).token_ids) == 9


def test_token_ids_need_no_tokenizer_and_text_does(tmp_path, target):
    model = dj.load(target, draft=write(tmp_path / "draft", DRAFT), max_batch=1)
    assert model.eos_ids == (3, 4)
    out = dj.generate(model, [5, 6, 7], PARAMS)
    assert out.text == ""
    assert out.token_ids == dj.generate(model, [5, 6, 7], PARAMS, draft=False).token_ids
    with pytest.raises(dj.TokenizerError, match=r"tokenizer\.json"):
        dj.generate(model, "text", PARAMS)
    with pytest.raises(dj.TokenizerError, match="stop strings"):
        dj.generate(model, [5], dj.SamplingParams(stop="x"))


def test_drafter_beside_the_target_is_taken(target):
    assert dj.load(target).draft is None
    write(target / "draft", DRAFT)
    assert dj.load(target).draft is not None
    assert dj.load(target, draft=False).draft is None


def test_dtype(target):
    assert dj.load(target).engine.dtype == np.float32
    for name in ("bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        half = dj.load(target, dtype=name, max_batch=1)
        assert half.engine.dtype == ml_dtypes.bfloat16
    assert len(dj.generate(half, [5, 6], dj.SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 32}, "features of width 32"),
        ({"num_target_layers": 9}, "9 layers"),
        ({"num_target_layers": 0, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 7]}}, "taps layers"),
        ({"vocab_size": 98}, "98 tokens"),
        ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 2]}}, "mask_token_id 97"),
        ({"hidden_size": 32, "target_hidden_size": 40}, "borrows the target's embedding"),
    ],
)
def test_pairs_that_do_not_fit(tmp_path, target, change, said):
    draft = write(tmp_path / "draft", DRAFT | change)
    with pytest.raises(dj.PairError, match=said):
        dj.load(target, draft=draft)


def test_a_published_drafter_that_cannot_be_had_can_be_left_out(target, monkeypatch):
    monkeypatch.setattr("dflash_jax.checkpoints.pair.KNOWN_DRAFTERS", {str(target): "owner/drafter"})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(dj.CheckpointError, match=rf"owner/drafter:\n(.|\n)*published for {target}; name another one"):
        dj.load(target)
    assert dj.load(target, draft=False, max_batch=1).draft is None


@pytest.mark.parametrize(("draft", "why"), [(False, "none is wanted"), (None, "none is known")])
def test_a_revision_of_no_drafter_is_refused(target, draft, why):
    with pytest.raises(dj.PairError, match=f"draft_revision='main' is for a drafter, and {why}"):
        dj.load(target, draft=draft, draft_revision="main")


def test_wrong_roles_and_options(tmp_path, target):
    draft = write(tmp_path / "draft", DRAFT)
    with pytest.raises(dj.PairError, match="is a drafter"):
        dj.load(draft)
    with pytest.raises(dj.PairError, match="not a DFlash drafter"):
        dj.load(target, draft=target)
    with pytest.raises(dj.PairError, match="no drafter is known"):
        dj.load(target, draft=True)
    for options, name in (
        ({"dtype": "int8"}, "dtype"), ({"dtype": "bf16"}, "dtype must be float32"),
        ({"max_batch": 0}, "max_batch"), ({"page_size": 0}, "page_size"),
        ({"max_model_len": 129}, "max_model_len"), ({"max_model_len": 1}, "max_model_len"), ({"num_pages": 0}, "num_pages"),
        ({"calibration": "one text", "cache_dtype": "fp8"}, "calibration must be a list"),
    ):  # fmt: skip
        with pytest.raises(dj.ParameterError, match=name):
            dj.load(target, **options)
    with pytest.raises(dj.CheckpointError):
        dj.load(tmp_path / "nothing")
    resolve = inspect.unwrap(resolve_source)  # the test run checks annotations first
    with pytest.raises(dj.CheckpointError, match="5:\n  - is of type int; give a folder"):
        resolve(5)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (None, "got NoneType; leave it out for none"), (5, "got int"), (b"ab", "got bytes"), (iter(["ab"]), "got list_iterator"),
        ([5], "got one with int 5 in it"), ([[5], None], "got one with NoneType None in it"),
        ([[5.0]], r"got one with list \[5.0\] in it"), ([[4, True]], r"got one with list \[4, True\] in it"),
        ([b"ab"], "got one with bytes b'ab' in it"),
    ],
)  # fmt: skip
def test_what_is_no_calibration_says_so(target, texts, said):
    load = inspect.unwrap(dj.load)  # the test run checks annotations first
    with pytest.raises(dj.ParameterError, match=f"calibration must be a list of texts or of token ids, {said}"):
        load(target, cache_dtype="fp8", calibration=texts)


@pytest.mark.few
def test_what_a_notebook_shows_is_short(target):
    """A model's fields hold every weight, a completion's every token."""
    model = dj.load(target, max_batch=2)
    held = f"{size(model.memory.weights)} of weights, no drafter, up to 2 requests of 128 tokens"
    assert repr(model) == f"Model({str(target)!r}: float32, {held})"
    assert len(repr(model.engine)) < 3000
    assert repr(dj.load(target, max_batch=1)).endswith("up to 1 request of 128 tokens)")
    write(target / "draft", DRAFT)
    assert "a drafter with blocks of 4" in repr(dj.load(target))
    out = dj.generate(model, [5] * 50, dj.SamplingParams(max_tokens=70, ignore_eos=True, logprobs=3, seed=8))
    shown = repr(out)
    assert shown.startswith("Completion(text='', finish_reason='length', stop_reason=None, seed=8, stats=Stats(")
    assert len(shown) < 400


WRONG = ([np.array([5, 6])], [jnp.array([5])], [[np.array([5, 6])]], [5.0], [[5], None], [b"a"], [True], np.array([5]))


@pytest.mark.parametrize("prompt", WRONG, ids=str)
def test_what_is_no_prompt_says_so(target, prompt):
    generate = inspect.unwrap(dj.generate)  # the test run checks annotations first
    with pytest.raises(
        dj.PromptError, match=r"must be a text, token ids or messages,.* got \w+.*: decode bytes, and give an array"
    ):
        generate(dj.load(target, max_batch=1), prompt, PARAMS)


def test_which_of_several_prompts_is_none_is_told(target):
    """As an empty cell of a table is among its texts."""
    generate = inspect.unwrap(dj.generate)  # the test run checks annotations first
    with pytest.raises(dj.PromptError, match=r"^prompts\[2\]: a prompt must be a text.* got float nan"):
        generate(dj.load(target, max_batch=1), [[5], [6], float("nan")], PARAMS)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ({"role": "user", "content": "x"}, r"^a message must be in a list, got one alone: give \[{"),
        ([[5], {"role": "user", "content": "x"}], r"^prompts\[1\]: a message must be in a list, got one alone"),
        (
            [{"role": "user", "content": "x"}, [5]],
            "^a list that begins with a message must hold messages alone, got list among",
        ),
    ],
)
def test_messages_outside_of_their_list_are_told_so(target, prompts, said):
    """Whoever gives one had been told to decode bytes."""
    with pytest.raises(dj.PromptError, match=said):
        inspect.unwrap(dj.generate)(dj.load(target, max_batch=1), prompts, PARAMS)


def test_token_ids_of_any_kind(target):
    model, generate = dj.load(target, max_batch=1), inspect.unwrap(dj.generate)
    expected = dj.generate(model, [5, 6], PARAMS).token_ids
    for prompt in (range(5, 7), (5, 6), list(np.array([5, 6])), [np.array(5), jnp.array(6)]):
        assert generate(model, prompt, PARAMS).token_ids == expected


@pytest.mark.parametrize("cycles", [0, -1, None, 2.5, "4", True])
def test_cycles_of_a_stream(target, cycles):
    with pytest.raises(dj.ParameterError, match="cycles must be an integer of at least 1"):
        inspect.unwrap(dj.stream)(dj.load(target, max_batch=1), [5, 6], PARAMS, cycles=cycles)


def test_scalars_of_arrays_are_numbers_and_flags(target):
    """What came out of an array of sizes to try ends in a model like any other, not in a numpy integer somewhere inside it."""
    sizes = {"max_batch": 2, "page_size": 16, "num_pages": 20, "max_model_len": 64}
    load, stream = inspect.unwrap(dj.load), inspect.unwrap(dj.stream)
    draft = write(target / "draft", DRAFT)
    sizes |= {"verify_length": 3, "draft_window": 40}
    model = load(target, draft=draft, **{name: np.int64(size) for name, size in sizes.items()})
    told = {name: getattr(model.engine, name) for name in sizes}
    assert told == sizes
    assert {type(size) for size in told.values()} == {int}
    inspect.unwrap(dj.Model.warmup)(model, modes=["greedy"], draft=[np.False_], batch=[np.int64(1)])
    (*_, last) = stream(model, [5, 6], PARAMS, cycles=np.int64(2), draft=np.False_, chat=np.array(False))
    assert last.completion.token_ids == dj.generate(model, [5, 6], PARAMS).token_ids
    for options in ({"max_batch": np.float64(2)}, {"num_pages": np.True_}, {"max_model_len": np.array([64])}):
        with pytest.raises(dj.ParameterError, match=f"^{next(iter(options))} must be an integer from "):
            load(target, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "Qwen/Qwen3-4B"}, "model must be what dflash_jax.load returns, got str 'Qwen/Qwen3-4B'"),
        ({"model": None}, "model must be what dflash_jax.load returns, got NoneType"),
        (
            {"draft": "z-lab/drafter"},
            "draft must be True or False, got 'z-lab/drafter': which drafter is for load to say",
        ),
        ({"draft": None}, "draft must be True or False, got None"),
        ({"chat": "yes"}, "chat must be True or False, got 'yes'"),
        (
            {"chat": True, "chat_options": "enable_thinking=false"},
            "chat_options must be names with values, .* got 'enable",
        ),
        ({"chat": True, "chat_options": {1: 2}}, r"chat_options must be names with values, .* got {1: 2}"),
    ],
)
def test_options_of_the_wrong_kind_are_refused_at_once(target, options, said):
    """Not in the middle with an error of Python's, and none is taken for something else in silence."""
    given = {"model": dj.load(target, max_batch=1), "prompts": [5, 6]} | options
    for call in (dj.generate, dj.stream):
        with pytest.raises(dj.ParameterError, match=said):
            inspect.unwrap(call)(**given)  # the test run checks annotations first


def test_options_of_a_template_that_is_not_used_are_refused(target):
    with pytest.raises(dj.ParameterError, match="chat=True"):
        dj.generate(dj.load(target, max_batch=1), [5, 6], PARAMS, chat_options={"enable_thinking": False})


def test_a_bar_counts_every_array_that_is_read(target, capsys, monkeypatch):
    dj.load(target, max_batch=1)
    assert "weights" not in capsys.readouterr().err
    dj.load(target, max_batch=1, progress=True)
    told = capsys.readouterr()
    assert told.out == ""
    count, total = re.findall(r"(\d+)/(\d+) \[", told.err)[-1]
    assert count == total != "0"
    monkeypatch.setattr(sys, "stderr", type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})())
    dj.load(target, max_batch=1, progress=True)  # in a notebook
    assert "weights: 100%" in capsys.readouterr().out


def test_interrupt_outside_the_device_calls(target, monkeypatch):
    """Ctrl-C while the bar is drawn: every page is free, also while the traceback is alive."""
    model = dj.load(target, max_batch=1)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tqdm.tqdm.set_postfix_str", interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        dj.generate(model, [5, 6, 7], PARAMS, progress=True)
    assert kept.tb is not None
    assert model.engine.allocator.num_free == model.engine.num_pages
    monkeypatch.undo()
    assert len(dj.generate(model, [5, 6, 7], dj.SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


@pytest.mark.few
def test_a_script_that_ends_with_a_stream_unfinished_says_nothing(target):
    """Left by `break` under a name of the script's own, it is closed when hardly any module has its names left."""
    code = (
        f"import dflash_jax as dj; model = dj.load({str(target)!r}, max_batch=1)\n"
        "for piece in (pieces := dj.stream(model, [5, 6], dj.SamplingParams(max_tokens=90, ignore_eos=True))): break"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
