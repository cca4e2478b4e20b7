"""Prefixes on the host: what names a chunk, where a replay starts, what is forgotten first."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import sessions

from v41jax import config, prefixes, v41_flash
from v41jax.prefixes import Prefixes, chunk_names, replay_start


def test_a_chunk_is_named_by_all_before_it():
    prompt = list(range(3, 60))
    names = chunk_names(prompt, ["encoder"] * 3 + ["exact"], 16)
    assert len(set(names)) == len(names) == 3  # whole chunks only
    assert chunk_names(prompt[:48], ["encoder"] * 3, 16) == names
    assert chunk_names([4, *prompt[1:]], ["encoder"] * 4, 16)[2] != names[2]
    assert chunk_names(prompt, ["exact", "encoder", "encoder"], 16)[1:] != names[1:]


def test_the_released_model_replays_what_its_windows_reach():
    # 20 encoder layers reach back 127 tokens each; the decoder's tail is 2541.
    assert v41_flash.decoder_tail == 2541
    for length, kept, exact_from in ((100_000, 90_000, 90_000), (100_000, 99_840, 97_459), (6000, 5632, 3459)):
        start = replay_start(length, kept, 512, v41_flash)
        assert start % 512 == 0
        assert start <= exact_from - 20 * 127 < start + 512
    assert replay_start(3000, 2560, 512, v41_flash) == 0


def test_what_was_used_longest_ago_is_forgotten_from_its_end():
    kept = Prefixes(40)
    for name in "abcd":
        kept.add(name, bytes(10))
    assert kept.find("ab") == [bytes(10)] * 2
    kept.add("e", bytes(10))  # c goes: d was added later, a and b were used
    assert kept.find("abc") == [bytes(10)] * 2
    assert kept.find("dx") == [bytes(10)]
    kept.add("f", bytes(10))
    kept.add("g", bytes(10))  # e was used longest ago, then b, as a must outlive it
    assert [name in kept for name in "abdefg"] == [True, False, True, False, True, True]
    assert kept.nbytes == 40
    kept.add("h", bytes(50))
    assert len(kept) == kept.nbytes == 0


def test_a_fingerprint_tells_weights_apart():
    params = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "code": np.arange(5, dtype=np.uint8)}
    cfg, seen = sessions.DRAFTING, set()
    other = {**params, "w": params["w"].copy()}
    other["w"][1, 2] = np.nextafter(other["w"][1, 2], 9)
    swapped = {**params, "code": params["code"][[1, 0, 2, 3, 4]]}
    for weights in (params, other, swapped):
        weights = {name: jnp.asarray(array) for name, array in weights.items()}
        seen |= {prefixes.fingerprint(weights, cfg, 16), prefixes.fingerprint(weights, cfg, 16)}
    assert len(seen) == 3
    assert prefixes.fingerprint(weights, config.tiny, 16) not in seen


def test_chunks_that_cut_a_group_are_refused():
    cfg = dataclasses.replace(config.tiny, compress_ratios=(0, 3, 3, 3, 1, 1, 1, 1, 1))
    with pytest.raises(ValueError, match="prefill_chunk=16 is not a multiple of 3 tokens"):
        prefixes.check(cfg, 16)
