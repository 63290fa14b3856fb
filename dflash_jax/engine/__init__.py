"""Token ids in, token ids out: slots, pages, admission, and the loop that keeps the device busy. Knows no text.

Life of a request: wait for a slot and for pages for its prompt; take over pages that hold the beginning of the prompt already;
prefill the rest chunk by chunk, while the others decode in between; run in cycles with the others, its pages growing ahead of it;
where the pool runs out, the youngest gives its pages back, waits, and is prefilled again with what it had emitted; leave.

`Engine` is the face, `Resources` holds weights, programs and pools, `Scheduler` serves requests of all threads, `Run` waits for
those of one caller.
"""

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.requests import STOP_WIDTH
from dflash_jax.engine.resources import CYCLES_PER_CHUNK, MAX_CYCLES
from dflash_jax.engine.run import Run
from dflash_jax.engine.scheduler import Scheduler

__all__ = ["CYCLES_PER_CHUNK", "MAX_CYCLES", "STOP_WIDTH", "Engine", "Run", "Scheduler"]
