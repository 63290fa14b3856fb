"""Draft heads and convolutions of drafters beyond v1, against worked examples and a float64 oracle of their equations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.draft_conv import GroupedConv
from dflash_jax.models.heads import (
    Block,
    DominoConfig,
    HeadConfig,
    LiLiCorrConfig,
    MarkovConfig,
    SelectorConfig,
    Sizes,
    XPressConfig,
    head_module,
    head_parameters,
)
from dflash_jax.models.heads.markov import Markov
from dflash_jax.models.heads.pairs import walk
from dflash_jax.models.heads.xpress import Mix

type Tables = dict[str, np.ndarray]


def greedy(first: int, scores: jax.Array, tokens: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), scores


def filled(config: HeadConfig, sizes: Sizes, tables: Tables) -> Any:
    """The head with these parameters, by names inside of it."""
    module = head_module(config, sizes)
    for name, value in tables.items():
        part = module
        for step in name.split("."):
            part = part[int(step)] if step.isdigit() else getattr(part, step)
        part[...] = jnp.asarray(value, jnp.float32)
    return module


def proposed(
    config: HeadConfig,
    sizes: Sizes,
    tables: Tables,
    hidden: Any,
    logits: Any,
    anchor: list[int],
    tokens: Any = None,
    *,
    first: Any = None,
    embeddings: Any = 0.0,
    context: Any = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Greedy proposals of a batch, and the scores that they were picked from with their tokens.

    `first` are states of slots that propose nothing.
    """
    embeddings, context = jnp.float32(embeddings), jnp.float32(context)

    @jax.jit
    def run(tables, hidden, logits, anchor):
        seen = None if tokens is None else jnp.asarray(tokens, jnp.int32)
        slots = hidden if first is None else jnp.concatenate([jnp.float32(first), hidden], axis=1)
        block = Block(anchor, hidden, logits, seen, slots, lambda ids: embeddings[ids], lambda: context)
        return filled(config, sizes, tables).propose(block, greedy)

    path, law = run(tables, jnp.float32(hidden), jnp.float32(logits), jnp.int32(anchor))
    return np.asarray(path), np.asarray(law.logits), None if law.tokens is None else np.asarray(law.tokens)


# Worked examples.


def test_a_convolution_by_hand() -> None:
    """Two taps, groups of two channels. Slot 0 has nothing before it, whatever its own weight of that tap is."""
    x = np.array([[[1, 2, 3, 4], [0, 1, 0, 1], [2, 0, 1, 0]]], np.float32)
    base, projection = np.zeros((2, 2, 4)), np.zeros((8, 4))
    base[0] = [[1, 1, 1, 1], [0.5, 0, 0, 0.5]]
    projection[0, 0], projection[3, 1] = 0.1, 0.2  # side 0: tap 0 of group 0, and tap 1 of group 1
    own, out = jax.jit(lambda: convolved(base, projection, x, x, 2, 0))()
    np.testing.assert_allclose(own[0, :, 0], [[[0.1, 0], [0, 0.4]], [[0, 0], [0, 0.2]], [[0.2, 0], [0, 0]]], atol=1e-7)
    np.testing.assert_allclose(out[0], [[1.1, 2.2, 3, 4], [0.5, 1, 0.6, 3.8], [2.4, 0, 1, 0.5]], atol=1e-6)


def convolved(base: Any, projection: Any, x: Any, z: Any, group: int, side: int) -> tuple[jax.Array, jax.Array]:
    conv = GroupedConv(x.shape[-1], base.shape[1], group)
    conv.base_kernel[...] = jnp.asarray(base, jnp.float32)
    conv.kernel_projection.weight[...] = jnp.asarray(projection, jnp.float32)
    own = conv.own(jnp.asarray(x))
    return own, conv(jnp.asarray(z), own, side)


SELECTOR = {
    "hidden_projection.weight": np.eye(2),
    "predecessor_codebook": np.array([[1, 0], [0, 1], [1, 1], [0, 0], [2, 0]]),
    "successor_codebook": np.array([[1, 0], [0, 1], [-1, 1], [1, 1], [0, 2]]),
}


def test_a_selector_by_hand() -> None:
    """Of the first place 2 and of the second 3 are best alone, of their pairs 0 and 3."""
    logits = np.full((1, 2, 5), -9.0)
    logits[0, 0, [2, 0]], logits[0, 1, [3, 1]] = [1, 0.9], [0.4, 0.3]
    sizes, hidden = Sizes(hidden=2, vocab=5, rows=5), [[[1, 0.5], [0.5, 1]]]
    path, scores, tokens = proposed(SelectorConfig(rank=2, top_k=2), sizes, SELECTOR, hidden, logits, [4])
    assert path.tolist() == [[0, 3]]
    assert tokens is not None
    assert tokens.tolist() == [[[2, 0], [3, 1]]]
    np.testing.assert_allclose(scores, [[[-1, 2.9], [0.9, 0.3]]], atol=1e-6)  # of the second place after token 0


def test_a_markov_head_by_hand() -> None:
    logits = [[[0, 1, 0.8, 0.2], [0.5, 0.4, 0.6, 0], [0.1, 0.2, 0.3, 0]]]
    tables = {
        "markov_w1.weight": np.array([[0], [1], [2], [-1]]), "markov_w2.weight": np.array([[0], [0.5], [-0.5], [1]])
    }  # fmt: skip
    sizes, hidden = Sizes(hidden=1, vocab=4, rows=4), np.zeros((1, 3, 1))
    path, scores, tokens = proposed(MarkovConfig(rank=1), sizes, tables, hidden, logits, [2])
    assert tokens is None
    assert path.tolist() == [[3, 2, 3]]
    np.testing.assert_allclose(
        scores, [[[0, 2, -0.2, 2.2], [0.5, -0.1, 1.1, -1], [0.1, 1.2, -0.7, 2]]], atol=1e-6
    )  # fmt: skip


def test_a_mix_by_hand() -> None:
    """What lies above the diagonal of a checkpoint's matrix counts for nothing, and every slot keeps its own."""
    mix = Mix(1, 3)
    mix.L[...] = jnp.array([[[0.3, 9, 9], [0.5, 0.2, 9], [0.1, 0.4, 0.6]]])
    folded = jax.jit(mix)(jnp.eye(3)[:, :, None])[:, :, 0].T
    np.testing.assert_allclose(folded, [[1.3, 0, 0], [0.5, 1.2, 0], [0.1, 0.4, 1.6]], atol=1e-6)


def test_candidates_are_the_best_with_the_noise_that_they_are_drawn_with() -> None:
    """Chosen with it and judged without it: columns are tokens, rows of a shortlist, or of the drafter's own vocabulary."""
    logits = jnp.array([[[3.0, 2.0, 1.0, 0.0]]])
    noise = jnp.array([[[0.0, -5.0, 0.0, 0.0, 9.0, 0.0, 4.0, 7.0]]])  # of tokens
    block = Block(jnp.zeros(1, jnp.int32), logits, logits, None, logits, jnp.asarray, lambda: logits)
    for tokens, listed, expected in (
        (None, None, [[0, 2]]), (None, [[[7, 1, 4, 5]]], [[7, 4]]), ([0, 4, 1, 7], None, [[4, 7]]),
        ([0, 4, 1, 7, 6], [[[0, 2, 4, 3]]], [[7, 6]]),
    ):  # fmt: skip
        given = block._replace(
            tokens=None if tokens is None else jnp.array(tokens), listed=None if listed is None else jnp.array(listed)
        )
        noisy = given.named(noise[..., :4] if tokens is None and listed is None else noise)
        unary, rows, chosen = given._replace(noise=noisy).best(2)
        assert chosen[0].tolist() == expected
        column = [
            int(np.flatnonzero(np.asarray(range(4) if listed is None else listed[0][0]) == row)[0])
            for row in rows[0, 0]
        ]
        assert unary[0, 0].tolist() == logits[0, 0, np.array(column)].tolist()


def test_a_walk_by_hand() -> None:
    scores = jnp.array([[[[0.2, 0.9], [0.2, 0.9]], [[0.1, 0.8], [0.7, 0.2]]]])
    path, law = walk(scores, jnp.array([[[0, 1], [0, 1]]]), greedy)
    assert path.tolist() == [[1, 0]]
    np.testing.assert_allclose(law.logits, [[[0.2, 0.9], [0.7, 0.2]]])


# Against the equations in float64.

SIZES = Sizes(hidden=6, vocab=23, rows=23, logit_scale=0.7)
OWN = Sizes(hidden=6, vocab=23, rows=11)  # a vocabulary of its own: row i is token 2 i + 1
B, PLACES = 3, 4


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def best(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-scores, kind="stable")[:count]


def selector_oracle(config: SelectorConfig, tables: Tables, h: np.ndarray, u: np.ndarray, ids: np.ndarray, prev: int):
    """One sequence: the path, its scores and their tokens."""
    path, laws, cands = [], [], []
    for t in range(len(h)):
        rows = best(u[t], config.top_k)
        gate = tables["predecessor_codebook"][prev] * (tables["hidden_projection.weight"] @ h[t])
        laws.append(u[t, rows] + tables["successor_codebook"][ids[rows]] @ gate)
        cands.append(ids[rows])
        prev = int(cands[-1][np.argmax(laws[-1])])
        path.append(prev)
    return path, laws, cands


def markov_oracle(
    config: MarkovConfig, tables: Tables, h: np.ndarray, u: np.ndarray, ids: np.ndarray, prev: int, scale: float
):
    path, laws, cands, s = [], [], [], np.zeros(config.rank)
    for t in range(len(h)):
        e = latent = tables["markov_w1.weight"][prev]
        if config.form == "gated":
            latent = sigmoid(tables["gate_proj.weight"] @ np.append(h[t], e) + tables["gate_proj.bias"]) * e
        if config.form == "rnn":
            joint = tables["joint_proj.weight"] @ np.concatenate([s, e, h[t]]) + tables["joint_proj.bias"]
            g, c, o = np.split(joint, 3)
            s, latent = sigmoid(g) * s + (1 - sigmoid(g)) * np.tanh(c), np.tanh(o)
        rows = best(u[t], config.top_k) if config.top_k else np.arange(len(ids))
        laws.append(u[t, rows] + scale * (tables["markov_w2.weight"][rows] @ latent))
        cands.append(ids[rows])
        prev = int(cands[-1][np.argmax(laws[-1])])
        path.append(prev)
    return path, laws, cands


def random_tables(config: HeadConfig, sizes: Sizes, rng: np.random.Generator) -> Tables:
    return {one.name.removeprefix("head."): rng.normal(size=one.shape) for one in head_parameters(config, sizes)}


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (SelectorConfig(rank=5, top_k=7), SIZES), (SelectorConfig(rank=5, top_k=4), OWN), (MarkovConfig(rank=5), SIZES),
        (MarkovConfig(rank=5, form="gated", top_k=4), OWN), (MarkovConfig(rank=5, form="rnn"), OWN),
        (MarkovConfig(rank=5, form="rnn", top_k=6), SIZES),
    ],
    ids=lambda one: getattr(one, "form", getattr(one, "kind", "")),
)  # fmt: skip
def test_heads_compute_their_equations(config: Any, sizes: Sizes) -> None:
    rng = np.random.default_rng(5)
    tables, anchor = random_tables(config, sizes, rng), rng.integers(0, sizes.vocab, B).tolist()
    hidden, logits = rng.normal(size=(B, PLACES, sizes.hidden)), rng.normal(size=(B, PLACES, sizes.rows))
    ids = np.arange(sizes.vocab) if sizes is SIZES else 2 * np.arange(sizes.rows) + 1
    path, scores, tokens = proposed(config, sizes, tables, hidden, logits, anchor, None if sizes is SIZES else ids)
    for b in range(B):
        given = (config, tables, hidden[b], logits[b], ids, anchor[b])
        true = selector_oracle(*given) if config.kind == "selector" else markov_oracle(*given, sizes.logit_scale)
        assert path[b].tolist() == true[0]
        np.testing.assert_allclose(scores[b], true[1], rtol=2e-6, atol=2e-5)
        if tokens is not None:
            np.testing.assert_array_equal(tokens[b], true[2])


@pytest.mark.parametrize("passes", [2, 6])
def test_xpress_computes_its_equations(passes: int) -> None:
    """Six passes over three places are a walk from left to right, two are not; the anchor's slot counts in the mean."""
    rng, places = np.random.default_rng(7), 3
    sizes = Sizes(hidden=6, vocab=23, rows=23, slots=4)
    config = XPressConfig(rank=5, inner=8, passes=passes, top_k=9)
    w, anchor = random_tables(config, sizes, rng), [3, 8]
    slots, logits = rng.normal(size=(2, 4, 6)), rng.normal(size=(2, places, 23))
    path, scores, tokens = proposed(config, sizes, w, slots[:, 1:], logits, anchor, first=slots[:, :1])
    assert tokens is not None
    for b in range(2):
        block, cands = [anchor[b], *np.argmax(logits[b], axis=-1)], [best(row, 9) for row in logits[b]]
        for _ in range(passes):
            h, whole = slots[b] @ w["down_h.weight"].T, w["down_g.weight"] @ slots[b].mean(axis=0)
            prev = w["w1.weight"][[anchor[b], *block[:-1]]]
            x = np.concatenate([h, np.tile(whole, (4, 1)), prev], axis=1) @ w["in_proj.weight"].T
            x = x + np.einsum("rtj,jr->tr", np.tril(w["mix.L"]), x)
            gate, up = x @ w["gate_proj.weight"].T, x @ w["up_proj.weight"].T
            latent = x + (gate * sigmoid(gate) * up) @ w["down_proj.weight"].T
            true = [logits[b, t, c] + w["w2.weight"][c] @ latent[t + 1] for t, c in enumerate(cands)]
            block = [anchor[b], *(int(c[np.argmax(row)]) for c, row in zip(cands, true, strict=True))]
        assert path[b].tolist() == block[1:]
        np.testing.assert_array_equal(tokens[b], cands)
        np.testing.assert_allclose(scores[b], true, rtol=1e-5, atol=2e-4)


def test_domino_computes_its_equations() -> None:
    """The first place keeps its base logits, though the recurrence runs over it."""
    rng, config = np.random.default_rng(8), DominoConfig(rank=5, state=7, kept=1)
    sizes = Sizes(hidden=6, vocab=23, rows=23)
    w, embeddings, anchor = random_tables(config, sizes, rng), rng.normal(size=(23, 6)), [3, 8]
    hidden, logits = rng.normal(size=(2, PLACES, 6)), rng.normal(size=(2, PLACES, 23))
    path, scores, _ = proposed(config, sizes, w, hidden, logits, anchor, embeddings=embeddings)
    for b in range(2):
        s, prev = np.zeros(7), anchor[b]
        for t in range(PLACES):
            gx, gh = w["input_proj.weight"] @ embeddings[prev], w["state_proj.weight"] @ s
            (rx, zx, nx), (rh, zh, nh) = np.split(gx, 3), np.split(gh, 3)
            z = sigmoid(zx + zh)
            s = (1 - z) * np.tanh(nx + sigmoid(rx + rh) * nh) + z * s
            latent = w["down_proj.weight"] @ np.append(hidden[b, t], s)
            true = logits[b, t] + (t > 0) * (w["up_proj.weight"] @ (latent * sigmoid(latent)))
            np.testing.assert_allclose(scores[b, t], true, rtol=1e-5, atol=1e-4)
            prev = int(np.argmax(true))
            assert path[b, t] == prev


@pytest.mark.parametrize("hidden", [6, 8])
def test_lilicorr_computes_its_equations(hidden: int) -> None:
    """With nodes as wide as the drafter and wider; of two sequences one has no context state."""
    rng, top_k, heads, slots, d, h = np.random.default_rng(hidden), 4, 2, 5, 6, hidden
    sizes = Sizes(hidden=d, vocab=23, rows=23, slots=slots, norm_eps=1e-5)
    config = LiLiCorrConfig(
        rank=5, top_k=top_k, hidden=h, layers=2, heads=heads, inner=9, vector_eps=1e-3, score_scale=3.0
    )
    w, embeddings = random_tables(config, sizes, rng), rng.normal(size=(23, d))
    states, logits, context = (rng.normal(size=(2, PLACES, n)) for n in (d, 23, d))
    context = context[:, 0] * [[1], [0]]
    given = {"embeddings": embeddings, "context": context}
    path, scores, tokens = proposed(config, sizes, w, states, logits, [3, 8], **given)
    assert tokens is not None

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def silu(x):
        return x * sigmoid(x)

    def unit(x):
        return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-3)

    for b in range(2):
        logs = logits[b] - np.log(np.exp(logits[b]).sum(-1, keepdims=True))
        cands = np.stack([best(row, top_k) for row in logs])
        lp, rank = np.take_along_axis(logs, cands, 1), np.arange(top_k)
        f = np.stack(
            [lp, np.exp(lp), lp - lp.max(1, keepdims=True), *np.broadcast_arrays(rank / 3, rank == 0, lp)[:2]], -1
        )
        f = (f - f.mean(-1, keepdims=True)) / np.sqrt(f.var(-1, keepdims=True) + 1e-5)
        f = f * w["feature_norm.weight"] + w["feature_norm.bias"]
        x = embeddings[cands] if h == d else dense(embeddings[cands], "token_proj")
        x = x + dense(states[b], "pass_hidden_proj")[:, None]
        x = x + dense(silu(dense(f, "feature_mlp.up_proj")), "feature_mlp.down_proj")
        x = (x + w["slot_embedding"][0, 0, :PLACES] + w["rank_embedding"][0, 0]).reshape(-1, h)
        slot = np.repeat(np.arange(PLACES), top_k)
        apart = slot[:, None] - slot
        for i in range(2):
            qkv = dense(norm(x, f"layers.{i}.attn_norm"), f"layers.{i}.in_proj").reshape(-1, 3, heads, h // heads)
            q, k, v = qkv.transpose(1, 2, 0, 3)
            s = np.einsum("nqd,nkd->nqk", q, k) / np.sqrt(h // heads) + w["relative_slot_bias"][:, apart + slots - 1]
            s = s + (apart == 0) * w["same_slot_bias"][:, None, None]
            p = np.exp(s - s.max(-1, keepdims=True))
            mixed = np.einsum("nqk,nkd->qnd", p / p.sum(-1, keepdims=True), v).reshape(-1, h)
            x = x + dense(mixed, f"layers.{i}.out_proj")
            y = norm(x, f"layers.{i}.mlp_norm")
            x = x + dense(silu(dense(y, f"layers.{i}.mlp.up_proj")), f"layers.{i}.mlp.down_proj")
        x = norm(x, "output_norm").reshape(PLACES, top_k, h)
        a = norm(dense(context[b], "context_proj") * (b == 0), "anchor_norm")
        g = silu(dense(np.concatenate([x, np.broadcast_to(a, x.shape), x * a], -1), "factor_input_proj"))
        out, into = unit(dense(g, "out_head")), unit(dense(g, "in_head"))
        row, expected = into[0] @ unit(dense(a, "anchor_out_head")), []
        for t in range(PLACES):
            expected.append(3.0 * row)
            c = int(np.argmax(row))
            assert path[b, t] == cands[t, c]
            row = into[t + 1] @ out[t, c] if t + 1 < PLACES else row
        np.testing.assert_array_equal(tokens[b], cands)
        np.testing.assert_allclose(scores[b], expected, atol=2e-4)


@pytest.mark.parametrize("reads", ["hidden", "hidden_and_token"])
def test_confidence(reads: str) -> None:
    config, rng = MarkovConfig(rank=5, confidence=reads, confidence_bias=reads == "hidden"), np.random.default_rng(6)
    tables, before, hidden = random_tables(config, SIZES, rng), np.array([3, 8]), rng.normal(size=(2, 6))
    head: Markov = filled(config, SIZES, tables)
    found = jax.jit(head.confidence)(jnp.asarray(before), jnp.float32(hidden))
    odds = jax.jit(head.confidence_logits)(jnp.asarray(before), jnp.float32(hidden))
    seen = hidden if reads == "hidden" else np.concatenate([hidden, tables["markov_w1.weight"][before]], axis=1)
    true = sigmoid(seen @ tables["confidence_proj.weight"][0] + tables.get("confidence_proj.bias", np.zeros(1)))
    np.testing.assert_allclose(np.asarray(found), true, atol=1e-6)
    np.testing.assert_allclose(np.asarray(odds), np.log(true / (1 - true)), atol=2e-6)
    assert config.confident
    assert not MarkovConfig(rank=5).confident


@pytest.mark.parametrize("side", [0, 1])
def test_convolutions_compute_their_equation(side: int) -> None:
    """Three taps; two blocks of a batch side by side, of which neither sees the other. Weights are another array's."""
    rng, taps, group, d = np.random.default_rng(side), 3, 2, 6
    base, projection = rng.normal(size=(2, taps, d)), rng.normal(size=(2 * taps * d // group, d))
    x, z = (rng.normal(size=(2, 4, d)).astype(np.float32) for _ in range(2))
    _, out = jax.jit(lambda x, z: convolved(base, projection, x, z, group, side))(x, z)
    true = np.zeros_like(z, np.float64)
    for b, t, o in np.ndindex(2, 4, taps):
        if o <= t:
            own = (projection @ x[b, t]).reshape(2, taps, d // group)[side, o]
            true[b, t] += (base[side, o] + np.repeat(own, group)) * z[b, t - o]
    np.testing.assert_allclose(np.asarray(out), true, atol=2e-5)
