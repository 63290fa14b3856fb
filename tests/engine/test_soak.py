"""A long day in a minute: `pytest -m gpu`."""

import random
import resource
from dataclasses import replace

import jax
import pytest

import dflash_jax as dj
from dflash_jax.engine.requests import Request

REQUESTS = 1000


@pytest.mark.gpu
def test_1000_requests_leave_nothing_behind():
    """More prompts than slots, a pool that is too small for them, common beginnings, cancelled ones; then everything is free."""
    rng = random.Random(0)
    model = dj.load(dtype="bfloat16", max_batch=16, max_model_len=280, page_size=16, num_pages=40)
    engine = replace(model.engine, max_chunk=32)
    stems = [[rng.randrange(4000) for _ in range(48)] for _ in range(4)]
    requests = []
    for i in range(REQUESTS):
        stem = rng.choice(stems)[: rng.randint(16, 48)]
        prompt = (*stem, *(rng.randrange(4000) for _ in range(rng.randint(1, 16))))
        params = dj.SamplingParams(
            max_tokens=rng.randint(1, 200), temperature=rng.choice([0.0, 1.0]), seed=i, ignore_eos=True
        )
        requests.append(Request(i, prompt, params))
    emitted, cancelled, memory = [0] * REQUESTS, set(), []
    run = engine.run(requests)
    for number, update in enumerate(run):
        emitted[update.index] += len(update.tokens)
        if rng.random() < 0.01:
            cancelled.add(victim := rng.randrange(REQUESTS))
            run.cancel(victim)
        if number % 1000 == 500:
            stats = jax.local_devices()[0].memory_stats()
            memory.append((stats["bytes_in_use"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    engine.allocator.check_integrity()
    assert engine.allocator.num_free == engine.num_pages
    assert engine.scheduler.stats.preemptions > 10, "the pool was large enough: the test shows too little"
    assert engine.scheduler.stats.cached_tokens > REQUESTS // 10 * engine.page_size
    wanted = [request.params.max_tokens for request in requests]
    assert all(emitted[i] == wanted[i] for i in range(REQUESTS) if i not in cancelled)
    assert all(emitted[i] <= wanted[i] for i in cancelled)
    device, host = zip(*memory, strict=True)
    assert len(memory) >= 5
    assert max(device[1:]) <= device[0] + (1 << 20), f"device memory grows: {device}"
    assert host[-1] <= host[0] + (64 << 10), f"host memory grows (KiB): {host}"
    assert sum(len(update.tokens) for update in engine.run(requests[:8])) == sum(wanted[:8])
