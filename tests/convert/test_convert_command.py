"""The command: what it says, what it refuses, and how it ends."""

import json
import shutil
import subprocess
import sys

import pytest
from dflash_convert import write
from dflash_convert.cli import main
from dflash_convert.parser import DTYPES, build_parser
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.checkpoints.converted import MARKER
from dflash_jax.checkpoints.mapping import KEEP


def test_dry_run_prints_the_plan_and_writes_nothing(hf, capsys):
    source = hf.qwen3(tie_word_embeddings=True)
    before = sorted(hf.root.rglob("*"))
    assert main([str(source), "--dry-run", "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("model.layers.1.self_attn.k_proj.weight"))
    assert line.split()[1:] == [
        "layers.1.attn.qkv_proj.weight",
        "32",
        "16x32",
        "bfloat16->float32",
        "stack+cast",
        "2,048",
    ]
    assert "peak memory about" in text
    assert sorted(hf.root.rglob("*")) == before


def test_dry_run_of_an_unusable_source(hf, capsys):
    source = hf.qwen3()
    tensors = load_file(source / "model.safetensors")
    tensors["surprise"] = tensors.pop("model.norm.weight")
    save_file(tensors, source / "model.safetensors")
    assert main([str(source), "--dry-run", "--json"]) == 3
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["exit_code"] == 3
    assert report["plan"]["target"]["missing"] == ["model.norm.weight"]
    assert report["plan"]["target"]["unexpected"] == ["surprise"]
    assert "surprise" in printed.err
    assert hf.convert(source, "--output", hf.root / "out") == 3
    assert not (hf.root / "out").exists()


def test_json_is_one_object_on_stdout(hf, capsys):
    assert main([str(hf.qwen3()), "--output", str(hf.root / "out"), "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["status"] == "ok"
    assert report["verified"] == "hash"
    assert report["target"]["parameters"] == 27
    assert report["peak_rss_bytes"] > 0
    assert "converting" in printed.err
    assert main([str(hf.root / "nothing"), "--dry-run", "--json", "--quiet"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "source not usable"
    assert report["problems"]


def test_quiet_prints_nothing(hf, capfd):
    assert hf.convert(hf.qwen3(), "--output", hf.root / "out") == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["SOURCE"],
        ["SOURCE", "--output", "SOURCE/inside"],
        ["SOURCE", "--output", "SOURCE", "--overwrite"],
        ["SOURCE", "--reverse", "--output", "out", "--dtype", "float16"],
        ["SOURCE", "--reverse", "--output", "out", "--overwrite"],
    ],
)
def test_wrong_usage(hf, arguments):
    source = hf.qwen3()
    before = sorted(hf.root.rglob("*"))
    assert hf.convert(*(word.replace("SOURCE", str(source)) for word in arguments)) == 2
    assert sorted(hf.root.rglob("*")) == before


def test_paths_behind_an_equals_sign_may_begin_at_home(hf, monkeypatch):
    """SOURCE, --draft and --output alike, and on the way back."""
    monkeypatch.setenv("HOME", str(hf.root))
    monkeypatch.chdir(hf.root)
    hf.qwen3()
    hf.dflash()
    assert hf.convert("~/target", "--draft=~/drafter", "--output=~/out/") == 0
    assert hf.convert("~/out", "--reverse", "--output=~/back") == 0
    assert hf.convert("target", "--output", "relative/out") == 0
    assert sorted(path.name for path in hf.root.iterdir()) == ["back", "drafter", "out", "relative", "target"]
    assert (hf.root / "back" / "draft" / "config.json").is_file()
    (hf.root / "file").touch()
    assert hf.convert("target", "--output=~/file") == 5
    assert hf.convert("~/out", "--reverse", "--output=~/out/inside") == 2
    assert hf.convert("~nobody-of-this-name/x", "--output=~/other") == 3
    loop = hf.root / "loop"
    loop.symlink_to(loop)
    assert hf.convert("target", "--output", loop) == 5


UNUSABLE = {
    "no tokenizer": ("tokenizer.json", '{"version": "1.0"}', "not a tokenizer"),
    "settings": ("tokenizer_config.json", "[]", "must hold a JSON object"),
    "template": ("chat_template.jinja", "x" * (1 << 20) + "x", "not a chat template"),
    "end token": ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id must be an id"),
}


@pytest.mark.parametrize(("name", "content", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_what_load_would_refuse_of_a_text_s_files_is_not_written(hf, name, content, said, capsys):
    source = hf.qwen3()
    assert hf.convert(source, "--output", hf.root / "whole") == 0
    (source / name).write_text(content)
    with pytest.raises(dj.DFlashError, match=said):
        dj.load(source)
    assert hf.convert(source, "--output", hf.root / "out") == 3
    assert said in capsys.readouterr().err
    assert main([str(source), "--dry-run", "--json"]) == 3
    assert said in json.loads(capsys.readouterr().out)["plan"]["target"]["problems"][0]
    shutil.copy(source / name, hf.root / "whole" / name)
    assert hf.convert(hf.root / "whole", "--reverse", "--output", hf.root / "out") == 3
    assert not (hf.root / "out").exists()


def test_what_is_written_loads(hf):
    assert hf.convert(hf.qwen3(), "--draft", hf.dflash(), "--output", hf.root / "out") == 0
    model = dj.load(hf.root / "out")
    assert model.tokenizer is not None
    assert model.tokenizer.encode("b") == [1]


def test_help_and_mistakes_import_nothing_slow():
    for arguments, code in ((["--help"], 0), (["--outptu"], 2)):
        text = f"""
import sys
import dflash_convert.command
from dflash_convert.cli import main
try:
    main({arguments})
except SystemExit as error:
    print(error.code, *{{"jax", "numpy", "flax", "orbax", "tqdm"}} & set(sys.modules))
"""
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == str(code)


def test_names_are_those_of_the_plan_and_the_folder():
    """Written out once more, because what defines them imports JAX."""
    assert DTYPES[0] == KEEP
    assert f"one with {MARKER}" in " ".join(build_parser().format_help().split())


@pytest.mark.parametrize("arguments", [[], ["x", "--dtype", "int8"], ["x", "--verify", "maybe"], ["x", "--unknown"]])
def test_wrong_usage_as_argparse_sees_it(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_a_target_and_a_drafter_that_do_not_fit(hf):
    target = hf.qwen3()
    assert hf.convert(target, "--draft", target, "--output", hf.root / "out") == 3
    deep = hf.dflash("deep", num_target_layers=9, dflash_config={"mask_token_id": 95, "target_layer_ids": [0, 7]})
    assert hf.convert(target, "--draft", deep, "--output", hf.root / "out") == 3
    assert not (hf.root / "out").exists()


@pytest.mark.parametrize("dry", [False, True])
def test_a_drafter_beside_the_source_is_not_left_out_in_silence(hf, dry, capsys):
    """`load` takes it from there, as `--reverse` leaves it; from the converted folder it would be gone."""
    source = hf.qwen3()
    draft = shutil.copytree(hf.dflash(), source / "draft")
    options = ["--dry-run"] if dry else ["--output", hf.root / "out"]
    said = f"notice: {draft} is not converted along: give --draft {draft}\n"
    assert main([str(source), *map(str, options)]) == 0
    assert said in capsys.readouterr().out
    options = ["--dry-run"] if dry else ["--output", hf.root / "both"]
    assert main([str(source), "--draft", str(draft), *map(str, options)]) == 0
    assert said not in capsys.readouterr().out
    assert (hf.root / "both" / "draft").is_dir() is not dry


def test_a_source_that_is_converted_already(hf, capsys):
    assert hf.convert(hf.qwen3(), "--output", hf.root / "out") == 0
    assert hf.convert(hf.root / "out", "--output", hf.root / "again") == 3
    assert "is converted already" in capsys.readouterr().err


def test_unexpected_failures_leave_nothing(hf, monkeypatch, capsys):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(write, "assemble", full)
    assert hf.convert(hf.qwen3(), "--output", hf.root / "out") == 1
    assert "no space left" in capsys.readouterr().err
    assert not list(hf.root.glob("out*"))


@pytest.mark.few
def test_the_installed_command_and_its_module_agree(hf):
    """One run through a real process: exit code, and nothing but the result on stdout."""
    source = hf.qwen3()
    code = "import sys; from dflash_convert.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(source), "--output", str(hf.root / "out")]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "peak memory" in first.stdout
    assert subprocess.run(command, capture_output=True).returncode == 5
