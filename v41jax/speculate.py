"""Speculative decoding: a step drafts a block, verifies it in one call of the backbone, and takes back what it rejects.

Without draft stages a step is plain decoding of one token. A step is a pure function of arrays on the device, a row
that has no token left to make changes nothing, and what a row draws depends on that row alone.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from v41jax import compressor, drafts, model, sampling
from v41jax.cache import DROP, Cache, Span, put_rows, take_rows
from v41jax.config import Config, layer_plan
from v41jax.drafts import DraftCache
from v41jax.model import Params
from v41jax.quant import Packed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
    """A batch of sequences under way."""

    cache: Cache
    rings: DraftCache | None  # of the draft stages; None decodes without drafts
    token_B: jax.Array  # i32, the newest token, which the backbone has not seen
    left_B: jax.Array  # i32, tokens a row has yet to make; 0: the row rests
    rows: sampling.Rows


class Block(NamedTuple):
    """Drafts [B, n] to verify, and how many of them."""

    token_BT: jax.Array  # i32
    logits_BTV: jax.Array  # f32 [B, n, V] from `sampling.restrict`, what they were drawn from
    count_B: jax.Array  # i32, 0..n


def check_block(cfg: Config) -> None:
    """Raises ValueError for a model that cannot draft, or whose window cannot take a whole block back."""
    if not cfg.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers=0: the model has no draft stages; decode it without drafts")
    if cfg.dspark_block_size >= cfg.sliding_window:
        raise ValueError(
            f"dspark_block_size={cfg.dspark_block_size} and the token before it overwrite a whole window of"
            f" sliding_window={cfg.sliding_window} rows; blocks below that can be taken back"
        )


def check(cfg: Config, *, drafts: bool, least_chance: float) -> None:
    """Raises ValueError for settings that no step can follow."""
    if not 0 <= least_chance <= 1:
        raise ValueError(f"least_chance={least_chance}; it is a probability, 0 (verify whole blocks) to 1")
    if drafts:
        check_block(cfg)


def feed(params: Params, cache: Cache, rings: DraftCache | None, tokens_BT, lengths_B, *, cfg: Config, mode: str):
    """Feeds prompt tokens to the backbone and, where there are rings, to the draft stages.

    Arguments as in `model.run`. Returns its logits, the next cache, the next rings.
    """
    logits, cache, records = model.run(params, cache, tokens_BT, lengths_B, cfg=cfg, mode=mode)
    if rings is not None and mode == "encoder":  # so many tokens must follow that no row of these outlasts them
        rings = dataclasses.replace(rings, length_B=cache.length_B)
    elif rings is not None:
        rings = drafts.seed(params, rings, *drafts.main_hidden(params, records, cfg=cfg), cfg=cfg)
    return logits, cache, rings


def step(params: Params, state: Decoding, least_chance, *, cfg: Config) -> tuple[sampling.Made, Decoding]:
    """Makes 1 to n + 1 tokens in every row that has some left, n = `dspark_block_size` (0 without drafts).

    They are the accepted drafts and one token more.

    Args:
      params: of the model.
      state: seeded with all tokens before `token_B`; donate it.
      least_chance: f32 in 0..1; a draft is verified while the chance that it and those before it are right, as the
        confidence head sees it, is at least this. 0 verifies every block whole. It changes no distribution.
      cfg: static.
    Returns:
      what was made, n + 1 columns, and the next state.
    """
    if state.rings is None:
        B, V = state.token_B.size, cfg.vocab_size
        none = Block(jnp.zeros((B, 0), jnp.int32), jnp.zeros((B, 0, V), jnp.float32), jnp.zeros((B,), jnp.int32))
        return verify(params, state, none, cfg=cfg)
    return verify(params, state, propose(params, state, least_chance, cfg=cfg), cfg=cfg)


def propose(params: Params, state: Decoding, least_chance, *, cfg: Config) -> Block:
    """Drafts a block behind each row's newest token; arguments as in `step`."""
    check_block(cfg)
    assert state.rings is not None
    first_B, logits = state.cache.length_B + 1, []

    def choose(logits_BV, place: int):
        token_B, drawn_from = sampling.sample_draft(logits_BV, state.rows, first_B + jnp.int32(place))
        logits.append(drawn_from)
        return token_B

    block = drafts.draft(params, state.rings, state.token_B, cfg=cfg, sample=choose)
    return Block(block.token_BT, jnp.stack(logits, axis=1), worth_verifying(block.confidence_BT, least_chance))


def worth_verifying(confidence_BT, least_chance):
    """Counts the drafts whose chance to be right, with all before them, is at least `least_chance`: i32 [B].

    Confidence at a place is known before its draft is drawn, so stopping by it favours no token.
    """
    chance_BT = jnp.cumprod(jax.nn.sigmoid(confidence_BT), axis=1)
    return jnp.sum(chance_BT >= least_chance, axis=1, dtype=jnp.int32)


def verify(params: Params, state: Decoding, block: Block, *, cfg: Config) -> tuple[sampling.Made, Decoding]:
    """Feeds the newest token and the drafts in one call, accepts drafts, and draws the token behind them.

    What was rejected leaves every array of the state, to the bit, as if it had not been fed.

    Args:
      params, state, cfg: as in `step`.
      block: n drafts, at most the window less one.
    """
    cache, rings = state.cache, state.rings
    width = 1 + block.token_BT.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)
    count_B = jnp.clip(block.count_B, 0, jnp.maximum(state.left_B - 1, 0))
    tokens_BT = jnp.concatenate([state.token_B[:, None], block.token_BT], axis=1)
    lengths_B = jnp.where(state.left_B > 0, 1 + count_B, 0)
    logits_BTV, after, records = model.run(params, cache, tokens_BT, lengths_B, cfg=cfg, mode="full", read="all")
    assert logits_BTV is not None  # as they are in mode "encoder" only

    key_BT = sampling.position_keys(state.rows.key_B, cache.length_B[:, None] + 1 + place)
    target_BTV = sampling.restrict(logits_BTV, state.rows)
    accepted_B, last_B = sampling.accept(target_BTV, block.logits_BTV, block.token_BT, count_B, key_BT)
    kept_B = jnp.where(state.left_B > 0, 1 + accepted_B, 0)

    if rings is not None:
        hidden, span = drafts.main_hidden(params, records, cfg=cfg)
        rings = drafts.seed(params, rings, hidden, dataclasses.replace(span, length_B=kept_B), cfg=cfg)
    if width > 1:  # else the only token is kept, or there was none
        after = take_back(params, cache, after, records, tokens_BT, kept_B, cfg=cfg)

    made_BT = jnp.where(place < accepted_B[:, None], jnp.roll(tokens_BT, -1, axis=1), last_B[:, None])
    made = sampling.report(jnp.where(place < kept_B[:, None], made_BT, -1), logits_BTV, state.rows)
    token_B = jnp.where(state.left_B > 0, last_B, state.token_B)
    return made, Decoding(after, rings, token_B, state.left_B - kept_B, state.rows)


def take_back(params, before: Cache, after: Cache, records, tokens_BT, kept_B, *, cfg: Config) -> Cache:
    """Takes all but the first `kept_B` tokens of a call back out of the cache, to the bit.

    Entries behind a row's length are zeros, as in an empty cache. Reading what they were before the call would be no
    different, and would make XLA copy every pool.

    Args:
      params: of the model.
      before, after: around the call of `model.run`, in mode "full".
      records: of that call.
      tokens_BT: i32, the call's, no more than the window has rows.
      kept_B: i32, 0 to the call's length.
    """
    width = tokens_BT.shape[1]
    assert width <= cfg.sliding_window
    span = Span(before.length_B, after.length_B - before.length_B, width)
    kept = dataclasses.replace(span, length_B=kept_B)
    slot_BT = span.position_BT % cfg.sliding_window
    back_BT = jnp.where(span.valid_BT & ~kept.valid_BT, slot_BT, DROP)
    windows = [
        put_rows(new, back_BT, take_rows(old, slot_BT))
        for new, old in zip(after.windows, before.windows, strict=True)
    ]  # fmt: skip
    flow, ngram_BN = model.embed(params, before.ngram_BN, tokens_BT, span=kept, cfg=cfg)
    pools = []
    for source, old, new in zip(cfg.kv_source_layer_ids, before.pools, after.pools, strict=True):
        layer, weights = layer_plan(cfg)[source], params["layers"][source]
        if layer.ratio > 1:  # the group that is open now may have been closed by the call
            into = records[source - 1].flow if source else flow
            _, x = model.enter(weights, into, layer=layer, cfg=cfg)
            compress = weights["attn"]["compressor"]
            _, _, open_group = compressor.compress(compress, x, old, span=kept, ratio=layer.ratio, cfg=cfg)
        else:
            open_group = new
        group = jnp.arange(-(-width // layer.ratio), dtype=jnp.int32)  # entries the call may have made
        entry_BG = span.start_B[:, None] // layer.ratio + group
        entry_BG = jnp.where(entry_BG < kept.end_B[:, None] // layer.ratio, DROP, entry_BG)
        entries, keys = _clear(new.entries, entry_BG), _clear(new.keys, entry_BG)
        pools.append(dataclasses.replace(open_group, entries=entries, keys=keys))
    owed_B = jnp.maximum(before.owed_B - kept_B, 0)
    return Cache(tuple(windows), tuple(pools), ngram_BN, kept.end_B, owed_B, after.capacity)


def _clear(planes: Packed, index_BG) -> Packed:
    """Writes zeros to rows of a pool at i32 indices, DROP writes nothing."""
    zeros = jax.tree.map(lambda p: jnp.zeros((*index_BG.shape, p.shape[2]), p.dtype), planes)
    return put_rows(planes, index_BG, zeros)
