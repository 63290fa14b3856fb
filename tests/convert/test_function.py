"""`dj.convert` does what the command does: the same folder, the same errors, and what there is to say as warnings."""

import warnings

import pytest

import dflash_jax as dj


def files(folder):
    """Every file's bytes, without the marker, which holds the time and versions."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.endswith("conversion.json")}


def test_the_function_writes_what_the_command_writes_and_back(hf, bits):
    target, drafter = hf.qwen3(), hf.dflash()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = dj.convert(target, str(hf.root / "function"), draft=drafter, dtype="float32", verify="logits")
    assert output == hf.root / "function"
    assert hf.convert(target, "--draft", drafter, "--dtype", "float32", "--output", hf.root / "command") == 0
    model, other = (dj.load(folder, max_batch=1, max_model_len=64) for folder in (output, hf.root / "command"))
    for ours, theirs in zip(*(flat(one.engine.weights) for one in (model, other)), strict=True):
        assert bits(ours) == bits(theirs)
    back = dj.convert(output, hf.root / "back", reverse=True)
    assert hf.convert(output, "--reverse", "--output", hf.root / "again") == 0
    assert files(back) == files(hf.root / "again")


def flat(weights):
    import jax

    return jax.tree.leaves(weights)


def test_what_the_command_would_say_is_warned_of(hf, capsys):
    target = hf.qwen3()
    hf.dflash("target/draft")
    with pytest.warns(UserWarning, match="is not converted along: give --draft"):
        dj.convert(target, hf.root / "out")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "")
    dj.convert(hf.qwen3("other"), hf.root / "shown", progress=True)
    told = capsys.readouterr()
    assert told.out == ""
    assert "100%" in told.err


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtype": "float8"}, dj.DFlashError, "dtype must be one of keep, bfloat16, float16, float32, got 'float8'"),
        ({"verify": "all"}, dj.DFlashError, "verify must be one of none, hash, logits, got 'all'"),
        ({"reverse": True, "draft": "x"}, dj.DFlashError, "goes with an output and"),
        ({"overwrite": "no"}, dj.DFlashError, "overwrite must be True or False, got 'no'"),
        ({"draft": "target"}, dj.PairError, "must be a target and --draft a drafter"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(hf, monkeypatch, options, error, said):
    monkeypatch.chdir(hf.root)
    hf.qwen3()
    with pytest.raises(error, match=said):
        dj.convert("target", "out", **options)
    assert sorted(path.name for path in hf.root.iterdir()) == ["target"]


def test_nothing_is_replaced_unasked(hf):
    source, output = hf.qwen3(), hf.root / "out"
    dj.convert(source, output)
    with pytest.raises(dj.DFlashError, match=r"--overwrite \(overwrite=True\)"):
        dj.convert(source, output)
    assert dj.convert(source, output, overwrite=True) == output
    with pytest.raises(dj.DFlashError, match="home of a user"):
        dj.convert(source, "~nobody-of-that-name/out")
