"""Programs that are compiled before they are needed: in the background, side by side, and the right ones."""

import inspect
import threading
import time
from concurrent.futures import wait

import jax
import jax.numpy as jnp
import pytest

import dflash_jax as dj
from dflash_jax.compile.programs import Programs, start_compiling
from dflash_jax.generation import STREAM_CYCLES, make_requests


@pytest.mark.few
@pytest.mark.parametrize(("draft", "lengths"), [(True, (300,)), (False, (40, 7, 530))])
def test_what_a_run_calls_first_is_compiled_while_weights_are_read(draft, lengths):
    prompts = [[(7 * i) % 4000 for i in range(length)] for length in lengths]
    params = dj.SamplingParams(max_tokens=20, ignore_eos=True)
    ahead = []

    def first_run(model):
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model.engine.weights))
        run = model.engine.run(make_requests(model, prompts, params), draft=draft, cycles=STREAM_CYCLES)
        ahead.extend(run.first_jobs())
        return run

    model = dj.load(dtype="float32", max_batch=4, max_model_len=600, ahead=first_run)
    wait(start_compiling(ahead))  # the same again: waits for those that load has begun
    compiled = model.engine.programs.shapes()
    assert len(compiled) == len(ahead)
    pieces = list(dj.stream(model, prompts, params, draft=draft))
    assert model.engine.programs.shapes() == compiled
    last = pieces[-1].completion
    assert last is not None
    assert last.stats.compile_s == 0
    plain = dj.load(dtype="float32", max_batch=4, max_model_len=600)
    expected = dj.generate(plain, prompts, params, draft=draft)
    assert [row.token_ids for row in expected] == [
        [token for piece in pieces if piece.index == i for token in piece.token_ids] for i in range(len(prompts))
    ]


def test_a_program_is_compiled_once_whoever_asks():
    programs, traced = Programs(), []

    def double(x):
        traced.append(threading.current_thread().name)
        time.sleep(0.2)
        return 2 * x

    jobs = [lambda: programs.prepare(double, (), (), jax.ShapeDtypeStruct((3,), jnp.float32))] * 5
    futures = start_compiling(jobs)
    assert programs.call(double, (), (), jnp.ones(3)).tolist() == [2, 2, 2]
    wait(futures)
    assert len(traced) == 1
    assert len(programs.shapes()) == 1
    assert all(future.exception() is None for future in futures)


def test_a_program_that_cannot_be_compiled_says_so_to_everybody():
    programs = Programs()

    def wrong(x):
        time.sleep(0.1)
        raise TypeError("no such program")

    futures = start_compiling([lambda: programs.prepare(wrong, (), (), jnp.ones(3))] * 2)
    with pytest.raises(TypeError, match="no such program"):
        programs.call(wrong, (), (), jnp.ones(3))
    wait(futures)
    assert [str(future.exception()) for future in futures] == ["no such program"] * 2
    assert programs.status(programs.key(wrong, (), (), jnp.ones(3))) == "missing"


def test_who_comes_while_a_program_is_compiled_counts_the_rest_of_it():
    """A request of another thread had all of it, and a first token that came before the request."""
    programs, begun = Programs(), threading.Event()

    def slow(x):
        begun.set()
        time.sleep(0.4)
        return x

    thread = threading.Thread(target=programs.call, args=(slow, (), (), jnp.ones(3)))
    thread.start()
    begun.wait()
    time.sleep(0.2)
    started, compiled = time.perf_counter(), programs.compile_s
    assert compiled > 0.19
    thread.join()
    assert 0.1 < programs.compile_s - compiled < time.perf_counter() - started
    assert programs.compile_s == programs.compile_s


def test_warmup_in_threads_keeps_the_callers_precision():
    seen = []
    with jax.default_matmul_precision("bfloat16"):
        wait(start_compiling([lambda: seen.append(jax.config.jax_default_matmul_precision)]))
    assert seen == ["bfloat16"]


def test_warmup_shows_a_bar_and_leaves_nothing_to_compile(capsys):
    model = dj.load(dtype="float32", max_batch=2, max_model_len=128)
    assert model.warmup(modes=["greedy"], draft=[True], batch=[2], progress=True) > 0
    done = capsys.readouterr().err.split("\r")[-1]
    assert "100%" in done
    assert "program" in done
    compiled = model.compiled_shapes()
    assert compiled
    for completion in dj.generate(model, ["import os", "def f("], dj.SamplingParams(max_tokens=8)):
        assert completion.stats.compile_s == 0
    assert model.compiled_shapes() == compiled
    model.warmup(modes=["greedy"], draft=[True], batch=[2])
    assert capsys.readouterr().err == ""


def test_warmup_refuses_what_no_request_can_be():
    model = dj.load(dtype="float32", max_batch=2, max_model_len=128)
    warmup = inspect.unwrap(dj.Model.warmup)  # in test runs a type checker around it would speak first
    with pytest.raises(
        dj.ParameterError,
        match=r"modes must be among greedy, sampled, full, adjusted, regular, structured, got \['beam'\]",
    ):
        warmup(model, modes=["beam"])
    with pytest.raises(dj.ParameterError, match=r"from 1 to max_batch, which is 2, got \[3\]"):
        model.warmup(batch=[1, 3])
    alone = dj.load(draft=False, dtype="float32", max_batch=2, max_model_len=128)
    with pytest.raises(dj.ParameterError, match=r"loaded without a drafter, got \[True\]"):
        alone.warmup(draft=[True])
    for wrong, said in (
        ({"modes": "greedy"}, r"modes must be a list, got 'greedy'"),
        ({"modes": None}, "modes must be a list, got None"),
        ({"draft": True}, r"draft must be a list, got True"),
        ({"draft": ["no"]}, r"draft must hold True, False or both, got \['no'\]"),
        ({"batch": 1}, r"batch must be a list, got 1"),
        ({"batch": ["1", 1.5]}, r"batch must hold integers from 1 to max_batch, which is 2, got \['1', 1.5\]"),
        ({"batch": [1.0, True]}, r"batch must hold integers .*, got \[1.0, True\]"),
    ):
        with pytest.raises(dj.ParameterError, match=said):
            warmup(model, **wrong)
    assert model.compiled_shapes() == []
