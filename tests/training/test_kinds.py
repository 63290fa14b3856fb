"""Losses of DFlash 2's and DSpark's heads against float64 oracles, their first weights, and drafters of each kind, trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.errors import ParameterError
from dflash_jax.models import bind, family_of
from dflash_jax.models.dflash import dflash_parameters
from dflash_jax.models.heads import Block
from dflash_jax.models.heads.markov import FORMS
from dflash_jax.training.card import title
from dflash_jax.training.drafter import block_hidden, train_drafter
from dflash_jax.training.evaluate import measure, noisy_pick
from dflash_jax.training.export import draft_json, export_pair
from dflash_jax.training.head_losses import Places, corrected, terms
from dflash_jax.training.kinds import KINDS, HeadSizes, carried, initial_weights, kind_of
from dflash_jax.training.optimizer import half, optimizer
from dflash_jax.training.settings import TINY, with_changes
from dflash_jax.training.stages import Clock
from dflash_jax.training.target import initial_target

LATER = [with_changes(TINY, draft_kind=kind) for kind in KINDS[1:]]
M, S = 2, 3


def random_weights(settings):
    """Weights of which none is zero."""
    params = initial_weights(settings.draft_config, 0)
    keys = jax.random.split(jax.random.key(1), len(params))
    return {
        name: value + 0.1 * jax.random.normal(key, value.shape)
        for key, (name, value) in zip(keys, params.items(), strict=True)
    }


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("taught", [False, True], ids=["tokens", "distributions"])
@pytest.mark.parametrize("settings", LATER, ids=KINDS[1:])
def test_terms_against_float64(settings, taught):
    config, params = settings.draft_config, random_weights(settings)
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(M, S, config.hidden_size)), rng.normal(size=(config.vocab_size, config.hidden_size))
    teacher, anchor = 3 * rng.normal(size=(M, S, config.vocab_size)), np.array([5, 9])
    base = hidden @ head.T
    tokens = np.argsort(-base, axis=-1)[..., [0, 2, 7]][:, np.arange(S), np.arange(S)]  # the last is no candidate
    places = Places(
        jnp.float32(hidden), jnp.asarray(anchor), jnp.asarray(tokens), jnp.float32(teacher) if taught else None
    )
    found = jax.jit(lambda p, places, head: terms(bind(config, p), places, head))(params, places, jnp.float32(head))

    w = {name: np.asarray(value, np.float64) for name, value in params.items()}
    p = softmax(teacher) if taught else np.eye(config.vocab_size)[tokens]
    before = np.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
    unary = -(p * np.log(softmax(base))).sum(-1)
    if settings.draft_kind == "dflash2":
        chosen = np.argsort(-base, axis=-1)[..., : config.head.top_k]
        left = w["head.predecessor_codebook"][before] * (hidden @ w["head.hidden_projection.weight"].T)
        scores = np.take_along_axis(base, chosen, -1)
        scores += np.einsum("msr,mscr->msc", left, w["head.successor_codebook"][chosen])
        q, p = softmax(scores), np.take_along_axis(p, chosen, -1)
        entropy, match = -(p * np.log(q)).sum(-1), np.minimum(p, q).sum(-1)
        loss = unary + entropy
        assert taught or entropy[0, 2] == 0.0
    else:
        embedded = w["head.markov_w1.weight"][before]
        q = softmax(base + embedded @ w["head.markov_w2.weight"].T)
        entropy, match = -(p * np.log(q)).sum(-1), np.minimum(p, q).sum(-1)
        logit = np.concatenate([hidden, embedded], -1) @ w["head.confidence_proj.weight"][0]
        sure = 1 / (1 + np.exp(-logit - w["head.confidence_proj.bias"]))
        loss = 0.1 * entropy + 0.9 * (1 - match) - match * np.log(sure) - (1 - match) * np.log(1 - sure)
    np.testing.assert_allclose(found.loss, loss, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(found.entropy, entropy, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(found.match, match, rtol=2e-4, atol=1e-5)


def test_convolutions_of_the_training_pass_end_with_their_block():
    config, params = LATER[0].draft_config, random_weights(LATER[0])
    anchor, key = 11, jax.random.key(3)
    table = jax.random.normal(key, (config.vocab_size, config.hidden_size))
    ids = jax.random.randint(key, (2, 24), 1, config.mask_token_id)
    features = jax.random.normal(key, (2, 24, 2 * config.hidden_size))
    anchors = jnp.array([[8, anchor], [anchor, 14]])
    trained = jax.jit(block_hidden, static_argnums=0)(config, params, table, ids, features, anchors)

    @jax.jit
    def drafted(params):
        draft = bind(config, params)
        context = draft.context_kv(
            draft.context(features[:, :anchor]), jnp.broadcast_to(jnp.arange(anchor), (2, anchor))
        )
        x = draft.block_embeddings(ids[:, anchor], table)
        positions = jnp.broadcast_to(anchor + jnp.arange(config.block_size), (2, config.block_size))
        return draft(x, positions, dense_attend(context=context))[0]

    one = drafted(params)
    np.testing.assert_allclose(trained[0, 1], one[0], atol=1e-4)
    np.testing.assert_allclose(trained[1, 0], one[1], atol=1e-4)


def test_kinds_begin_as_the_same_drafter():
    prompts = np.asarray(jax.random.randint(jax.random.key(1), (1, 8), 1, 300))
    target, found = half(initial_target(TINY)), {}
    for kind in KINDS:
        settings = with_changes(TINY, draft_kind=kind, evaluation_new=8)
        assert kind_of(settings.draft_config) == kind
        kinds, _ = measure(settings, target, half(initial_weights(settings.draft_config, 1)), prompts, temperature=0.0)
        found[kind] = kinds["argmax"].cycles
    assert found["v1"] == found["dflash2"] == found["dspark"]


@pytest.mark.parametrize(("form", "rank"), [("vanilla", 12), ("gated", 8), ("gated", 12), ("rnn", 12)])
def test_a_head_of_another_form_begins_as_the_one_before(form, rank):
    config = with_changes(TINY, draft_kind="dspark", head=HeadSizes(rank=rank, form=form)).draft_config
    before = with_changes(TINY, draft_kind="dspark").draft_config
    start = random_weights(with_changes(TINY, draft_kind="dspark"))
    grown = carried(config, start, 5)
    assert {name: value.shape for name, value in grown.items()} == {
        parameter.name: parameter.shape for parameter in dflash_parameters(config)
    }
    again = carried(config, grown, 6)
    assert all(np.array_equal(again[name], value) for name, value in grown.items())
    hidden, tokens = jax.random.normal(jax.random.key(2), (M, S, config.hidden_size)), jnp.array([[3, 8, 1], [9, 2, 2]])
    base = jnp.zeros((M, S, config.vocab_size))
    first, then = (
        corrected(bind(one, params).head, base, hidden, tokens) for one, params in ((before, start), (config, grown))
    )
    np.testing.assert_allclose(then, first, atol=2e-2 if form == "rnn" else 1e-5)


@pytest.mark.parametrize(("form", "rank"), [("rnn", 8), ("vanilla", 8), ("gated", 16)])
def test_a_head_that_cannot_begin_as_another_is_refused(form, rank):
    config = with_changes(TINY, draft_kind="dspark", head=HeadSizes(rank=rank, form=form)).draft_config
    start = random_weights(with_changes(TINY, draft_kind="dspark", head=HeadSizes(rank=12, form="gated")))
    with pytest.raises(ParameterError, match="set form to 'gated' and rank to 12"):
        carried(config, start, 5)


@pytest.mark.parametrize("form", FORMS)
def test_corrected_logits_are_those_of_the_walk(form):
    settings = with_changes(TINY, draft_kind="dspark", head=HeadSizes(rank=8, form=form))
    draft = bind(settings.draft_config, random_weights(settings))
    hidden, anchor = jax.random.normal(jax.random.key(2), (M, S, settings.hidden_size)), jnp.array([3, 9])
    base = jax.random.normal(jax.random.key(3), (M, S, settings.vocab_size))
    block = Block(anchor, hidden, base, None, hidden, lambda ids: ids, lambda: hidden)
    path, law = draft.head.propose(block, noisy_pick(None))
    before = jnp.concatenate([anchor[:, None], path[:, :-1]], axis=1)
    np.testing.assert_allclose(corrected(draft.head, base, hidden, before), law.logits, atol=1e-5)


def test_muon_steps_along_orthogonal_matrices_and_adamw_elsewhere():
    key = jax.random.key(0)
    params = {
        "fc.weight": jax.random.normal(key, (8, 16)),
        "embed.weight": jnp.ones((6, 4)),
        "norm.weight": jnp.ones(4),
    }
    grads = jax.tree.map(jnp.ones_like, params) | {"fc.weight": params["fc.weight"]}
    steps = {kind: optimizer(0.0, kind) for kind in ("adamw", "muon")}
    updates = {kind: step.update(grads, step.init(params), params)[0] for kind, step in steps.items()}
    singular = np.linalg.svd(updates["muon"]["fc.weight"], compute_uv=False)
    np.testing.assert_allclose(singular, 0.2 * 4, rtol=0.35)  # five steps of Newton and Schulz are not exact
    for name in ("embed.weight", "norm.weight"):
        np.testing.assert_array_equal(updates["muon"][name], updates["adamw"][name])
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape, updates["muon"], params))


@pytest.fixture(scope="module")
def continuations():
    """Sequences that repeat four tokens, which any drafter can learn, as greedy and as sampled ones."""
    rng = np.random.default_rng(0)

    def rows(count, length):
        return np.tile(rng.integers(1, 300, (count, 4)), (1, -(-length // 4)))[:, :length].astype(np.uint16)

    return [{kind: rows(16, plan.length) for kind in ("greedy", "sampled")} for plan in TINY.rollouts]


@pytest.mark.parametrize("settings", LATER, ids=KINDS[1:])
def test_what_is_exported_is_read_as_the_same_kind(settings):
    config = settings.draft_config
    names = [source.name for parameter in dflash_parameters(config) for source in parameter.sources]
    assert family_of(draft_json(settings)).config(draft_json(settings), names) == config


@pytest.mark.few("vanilla")
@pytest.mark.parametrize(("form", "sampled_loss"), [("vanilla", "places"), ("rnn", "block")], ids=["vanilla", "rnn"])
def test_a_trained_drafter_loads_and_leaves_texts_alone(form, sampled_loss, continuations, tmp_path):
    settings = with_changes(
        TINY,
        draft_kind="dspark",
        draft_steps=20,
        optimizer="muon",
        sampled_loss=sampled_loss,
        blocks="cycles" if form == "rnn" else "even",
        head=HeadSizes(rank=8, form=form),
    )
    lines: list[str] = []
    clock = Clock(tmp_path / "work", lines.append)
    target = initial_target(settings)
    draft = train_drafter(settings, target, continuations, tmp_path / "work" / "drafter", clock)
    history = clock.log["drafter"]["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    assert ("stands" in history[0]) == (sampled_loss == "block")
    tokenizer = tmp_path / "tokenizer.json"
    _word_tokenizer(settings.vocab_size, tokenizer)
    cards = {"target": "", "draft": title(settings.draft_config)}
    export_pair(settings, half(target), half(draft), tokenizer, cards, tmp_path / "out")
    model = dj.load(
        tmp_path / "out" / "target", draft=tmp_path / "out" / "draft", dtype="float32", max_model_len=32, max_batch=1
    )
    params = dj.SamplingParams(max_tokens=8, ignore_eos=True)
    drafted, plain = (dj.generate(model, [5, 6, 7, 8], params, draft=draft) for draft in (True, False))
    assert drafted.token_ids == plain.token_ids
    assert model.draft == settings.draft_config


def _word_tokenizer(vocab, path):
    from tokenizers import Tokenizer, models

    words = {"<|endoftext|>": 0} | {f"w{index}": index for index in range(1, vocab - 1)}
    Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>")).save(str(path))
