"""Counts the scores of NaN that selection treats as -inf without a word."""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

_COUNTING = jax.make_user_context(default_value=False)
_open: list[collections.Counter] = []
_lock = threading.Lock()  # callbacks come from threads of the runtime


@contextlib.contextmanager
def count_nans() -> Iterator[collections.Counter]:
    """Counts scores of NaN in every scoring and selecting operation that runs inside.

    Yields:
      a Counter by operation, complete when the context ends: visible scores of NaN in "index_scores" and "pool_scores",
      entries of NaN that count in "block_max" and "masked_topk"; 0 where an operation ran and met none. Scores that a
      caller repeats, as padding or on replicated devices, count each time.

    Scores are computed again, by the reference, 32 queries at a time: slow. Results still come from the chosen backend.
    Functions jitted outside are traced anew inside; outside, nothing of this is traced.
    """
    counts = collections.Counter()
    with _lock:
        _open.append(counts)
    try:
        with _COUNTING(True):
            yield counts
    finally:
        jax.effects_barrier()
        with _lock:
            _open[:] = [other for other in _open if other is not counts]


def report_nans(name: str, count: Callable, *arrays, **static) -> None:
    """Inside `count_nans`, adds the sum of count(*arrays, **static), i32 of any shape, to what `name` has met."""
    if _COUNTING.value:
        jax.debug.callback(functools.partial(_add, name), count(*map(jnp.asarray, arrays), **static))


def _add(name, count):
    total = int(np.asarray(count).sum(dtype=np.int64))
    with _lock:
        for counts in _open:
            counts[name] += total
