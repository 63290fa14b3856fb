"""The state of a decode loop: one pytree of device arrays, donated to every program that changes it."""

from dataclasses import dataclass, replace
from typing import Literal, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.attention.mla import BY_ARITHMETIC, LatentForm
from dflash_jax.cache.pages import Pages
from dflash_jax.config import DecoderConfig
from dflash_jax.decoding.sampling import Mode, RequestArrays
from dflash_jax.models.dflash_config import DFlashConfig

Proposals = Literal["shared_noise", "argmax", "rejection"]


@dataclass(frozen=True)
class Setup:
    """What a program is compiled for. Every change of a field, of B or of the page table's width compiles again.

    Attributes:
      target, draft: configurations; draft None is plain decoding.
      mode: greedy; sampled adds temperature; full adds filters and min_tokens.
      logprobs: whether log-probabilities come back.
      proposals: how a drafter proposes where a request samples: its own logits plus the target's noise, its argmax, or its own
        sample judged by p/q rejection.
      draft_temperature: divides the drafter's logits before noise is added, on top of the request's temperature.
      draft_window: tokens before a block that the drafter sees, the last ones, in whole pages; None for all.
      form: how a prompt attends where the target's attention is latent.
      imposed_acceptance: tokens each cycle gains on average, whatever the target chooses. Only `dflash_jax.bench` sets it.
      verified: tokens the target verifies in a cycle where that is fewer than the drafter offers; 1 drafts nothing and keeps the
        drafter's pages up to date, so that drafting can begin again at any time.
    """

    target: DecoderConfig
    draft: DFlashConfig | None = None
    mode: Mode = "greedy"
    logprobs: bool = False
    proposals: Proposals = "shared_noise"
    draft_temperature: float = 1.0
    draft_window: int | None = None
    form: LatentForm = BY_ARITHMETIC
    imposed_acceptance: float | None = None
    verified: int | None = None

    def for_prefill(self) -> "Setup":
        """The fields a prefill depends on: every way of sampling shares its programs."""
        return Setup(target=self.target, draft=self.draft, form=self.form)

    def verifying(self, length: int) -> "Setup":
        """The same with so many tokens verified in a cycle, at most all that are offered."""
        return replace(self, verified=None if length >= self.offered else length)

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.draft is None else self.draft.target_layer_ids

    @property
    def offered(self) -> int:
        """The pending token and all that the drafter proposes after it: the most that one cycle can gain."""
        return 1 if self.draft is None else self.draft.num_drafts + 1

    @property
    def width(self) -> int:
        """Tokens the target verifies in one cycle (T): the pending one and the first proposals."""
        return self.offered if self.verified is None else min(self.verified, self.offered)


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """B slots between two cycles.

    Attributes:
      pending: emitted last, not yet in the target's pages; stands at position `seq_lens`.
      seq_lens: tokens in the target's pages.
      features: tapped features of the tokens committed last cycle, zeros elsewhere. Between two programs there are as many rows
        as the drafter offers tokens, within a loop as many as are verified.
      fresh: how many of those rows are real; they belong to the positions just before `seq_lens` and are not yet in the
        drafter's pages.
      produced: tokens emitted so far, the pending one included.
      remaining: tokens that may still be emitted.
      done: finished or empty slots; they change nothing and read nothing.
    """

    pending: Int[Array, "B"]
    seq_lens: Int[Array, "B"]
    features: Float[Array, "B T nD"]
    fresh: Int[Array, "B"]
    produced: Int[Array, "B"]
    remaining: Int[Array, "B"]
    done: Bool[Array, "B"]
    request: RequestArrays
    target_pages: Pages
    draft_pages: Pages


_NUMBERS = ("pending", "seq_lens", "fresh", "produced", "remaining", "done")


def apart(state: DecodeState) -> tuple[Int[Array, "B 6"], DecodeState]:
    """The slots' numbers in one array, `done` last, and what is left: a loop changes them by one operation, not by six."""
    numbers = jnp.stack([getattr(state, name).astype(jnp.int32) for name in _NUMBERS], axis=1)
    return numbers, replace(state, **dict.fromkeys(_NUMBERS))


def together(numbers: Int[Array, "B 6"], rest: DecodeState) -> DecodeState:
    """The state that `apart` took apart."""
    named = dict(zip(_NUMBERS, numbers.T, strict=True))
    return replace(rest, **named | {"done": named["done"] > 0})


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """What cycles gave out; with a leading axis of cycles after a loop.

    Attributes:
      tokens: emitted tokens, valid up to `counts`.
      counts: tokens emitted by each slot; 0 for done slots, at least 1 otherwise.
      accepted: proposals that stood before max_tokens and stop ids cut the row.
      logprobs: log-probability of each emitted token, 1 where not asked for.
      top_ids, top_logprobs: the most probable tokens at each place; width 0 where not asked for.
    """

    tokens: Int[Array, "B T"]
    counts: Int[Array, "B"]
    accepted: Int[Array, "B"]
    logprobs: Float[Array, "B T"]
    top_ids: Int[Array, "B T k"]
    top_logprobs: Float[Array, "B T k"]
