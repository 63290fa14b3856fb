"""What counts energy, with a counter that moves as a driver's does."""

import time
from types import SimpleNamespace

import jax
import pytest

from dflash_jax.models import family_named, init_params

from ..small_pair import small_pair

TICK_S, WATTS = 0.05, 350


@pytest.fixture
def energy(script, monkeypatch):
    module = script("energy")
    began = time.perf_counter()

    def millijoules(gpu) -> int:
        """Stands still between two ticks."""
        return int((time.perf_counter() - began) / TICK_S) * int(TICK_S * WATTS * 1e3)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: ("index", index),
        "nvmlDeviceGetHandleByUUID": lambda name: ("uuid", name),
        "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": millijoules,
        "nvmlDeviceGetClockInfo": lambda gpu, kind: 1500,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: module.pynvml.nvmlClocksEventReasonSwPowerCap,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(module.pynvml, name, answer)
    return module


def test_watts_are_those_between_two_moves_of_the_counter(energy):
    meter = energy.Meter()
    for _ in range(2):
        with meter:
            time.sleep(0.4)
    assert meter.watts == pytest.approx(WATTS, rel=0.15)
    assert 0 < meter.counted_s < meter.seconds
    said = meter.said()
    assert (said["power_limit_w"], said["clock_mhz"], said["share_capped"]) == (700, 1500, 1)
    meter.clear()
    with meter:
        time.sleep(TICK_S / 2)
    with pytest.raises(SystemExit, match="stood still"):
        _ = meter.watts


@pytest.mark.parametrize(
    ("visible", "gpu"),
    [(None, ("index", 0)), ("", ("index", 0)), ("3,1", ("index", 3)), ("GPU-5f", ("uuid", "GPU-5f"))],
)
def test_the_gpu_is_the_first_visible_one(energy, monkeypatch, visible, gpu):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert energy.Meter().gpu == gpu


def test_products_are_those_of_layers_and_head(energy):
    """Two operations for every row and number of the layers' matrices and the head's; tokens as the layers give them."""
    target, drafter = small_pair(hidden=64, inner=128, vocab=96, head_dim=16)
    weights = {
        role: init_params(family_named(family).parameters(config), jax.random.key(3), "float32")
        for role, family, config in (("target", "qwen3", target), ("draft", "dflash", drafter))
    }
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    engine = SimpleNamespace(weights=weights, target=target, draft=drafter)
    assert energy.operations(engine, 5) == 2 * 5 * (3 * layer + 96 * 64)
    bound = energy.bind(target, weights["target"])
    x = jax.random.normal(jax.random.key(1), (1, 8, 64))
    best, _ = energy.multiplied(bound, energy.bind(drafter, weights["draft"]), x, "xla")
    hidden = x
    for block in bound.layers:
        inner = block.attn.qkv_proj(block.input_norm(hidden))[..., :64]
        hidden = hidden + block.attn.o_proj(inner)
        hidden = hidden + block.mlp(block.post_norm(hidden))
    assert best.tolist() == bound.logits(bound.norm(hidden))[0].argmax(-1).tolist()
