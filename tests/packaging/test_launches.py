"""What `benchmarks/launches.py` reads from a program as XLA prints it; compiling one takes JAX's compiler for NVIDIA GPUs."""

import pytest

PROGRAM = """HloModule jit_loop, is_scheduled=true

%fused_add (p.1: s32[]) -> s32[] {
  %p.1 = s32[] parameter(0)
  ROOT %add.1 = s32[] add(%p.1, %p.1)
}

%region_1.53 (arg: (s32[], bf16[8,4], f32[4])) -> (s32[], bf16[8,4], f32[4]) {
  %arg = (s32[], bf16[8,4]{1,0}, /*index=2*/f32[4]{0}) parameter(0)
  %number = s32[] get-tuple-element(%arg), index=0
  %x = bf16[8,4]{1,0} get-tuple-element(%arg), index=1
  %call.1 = (bf16[8,4]{1,0}, f32[4]{0}) custom-call(%x, %number), metadata={op_name="jit(loop)/while/body/draft/dense" frame=3}
  %left = bf16[8,4]{1,0} get-tuple-element(%call.1), index=0
  %view = bf16[4,8]{1,0} bitcast(%left)
  %right = f32[4]{0} get-tuple-element(%call.1), index=1
  %call.2 = bf16[8,4]{1,0} custom-call(%view), target="k", metadata={op_name="jit(loop)/while/body/verify/dense"}
  %add_fusion = s32[] fusion(%number), kind=kLoop, calls=%fused_add
  %scale_fusion = f32[4]{0} fusion(%right, %call.2), calls=%s, metadata={op_name="jit(loop)/while/body/commit/mul"}
  ROOT %tuple.9 = (s32[], bf16[8,4]{1,0}, f32[4]{0}) tuple(%add_fusion, %call.2, %scale_fusion)
}

ENTRY %main.2 (x.1: bf16[8,4]) -> bf16[8,4] {
  %x.1 = bf16[8,4]{1,0} parameter(0)
  ROOT %call.3 = bf16[8,4]{1,0} custom-call(%x.1), target="k"
}
"""


@pytest.fixture(scope="module")
def launches(script):
    return script("launches")


def test_launches_of_the_loops_body(launches) -> None:
    """What is taken from a result through tuples and views waits for what made it."""
    steps = launches.launches(PROGRAM)
    assert [(step.name, step.kind, step.after) for step in steps] == [
        ("call.1", "custom-call", ()),
        ("call.2", "custom-call", ("call.1",)),
        ("add_fusion", "fusion", ()),
        ("scale_fusion", "fusion", ("call.1", "call.2")),
    ]
    assert [step.source for step in steps] == ["draft/dense", "verify/dense", "", "commit/mul"]
    assert steps[0].shape == "(bf16[8,4], f32[4])"
    assert launches.chain(steps) == 3
    assert launches.chain([]) == 0


def test_without_the_compiler_it_says_what_to_install(launches, monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["launches.py"])
    with pytest.raises(SystemExit, match="pip install jax-cuda13-plugin"):
        launches.main()


@pytest.mark.parametrize("words", [["--layers", "0"], ["--layers", "37"], ["--batch", "0"], ["--context", "-1"]])
def test_sizes_that_are_none_are_refused(launches, monkeypatch, capsys, words) -> None:
    monkeypatch.setattr("sys.argv", ["launches.py", *words])
    with pytest.raises(SystemExit):
        launches.main()
    assert "must be at least 1, --layers 1 to 36 for qwen3-4b" in capsys.readouterr().err
