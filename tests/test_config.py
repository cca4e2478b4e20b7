"""The config: what it refuses, what layers it makes, and config.json."""

import collections
import dataclasses
import json

import pytest
from golden_data import GOLDEN

from v41jax import config, config_json
from v41jax.config import Config, Role, layer_plan

flash, tiny = config.v41_flash, config.tiny


def change(**changes):
    return dataclasses.replace(tiny, **changes)


REFUSED = [
    ({"vocab_size": 0}, "vocab_size=0; it must be a whole number, 1 or more"),
    ({"index_topk": 2.5}, "index_topk=2.5; it must be a whole number"),
    ({"sliding_window": -8}, "sliding_window=-8"),
    ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters=0"),
    ({"hc_mult": 1}, "hc_mult=1; hyper-connections need 2 streams or more"),
    ({"head_dim": 40}, "head_dim=40 is not a multiple of 32; try 64"),
    ({"index_head_dim": 33}, "index_head_dim=33 is not a multiple of 32; try 64"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is not a multiple of 2; try 8"),
    ({"qk_rope_head_dim": 64}, "qk_rope_head_dim=64 exceeds a head of 32 channels"),
    ({"o_groups": 3}, "o_groups=3 does not divide the 128 channels"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is not between 1 and n_routed_experts=6"),
    ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok=5 is not between 1 and dspark_n_routed_experts=4"),
    ({"scoring_func": "relu"}, "scoring_func='relu' is not one of"),
    ({"hidden_size": 80}, "hidden_size=80 is not a multiple of the FP4 weight group 32"),
    ({"moe_intermediate_size": 48}, "moe_intermediate_size=48 is not a multiple of the FP4 weight group 32"),
    ({"engram_num_embeddings": (462,)}, "engram_num_embeddings lists 1 tables for 2 engram layers"),
    ({"engram_num_embeddings": (462, 2**31)}, "engram_num_embeddings=2147483648 does not fit 31 bits"),
    ({"engram_max_ngram_size": 1}, "engram_max_ngram_size=1 is under 2"),
    ({"engram_head_dim": 40}, "engram_head_dim=40 is not a multiple of 32"),
    ({"engram_vocab_size": 2**30}, r"engram_vocab_size=1073741824 must be under 2\*\*30"),
    ({"engram_pad_token_id": 512}, "engram_pad_token_id=512 is not a token of the 512"),
    ({"dspark_target_layer_ids": ()}, "draft stages need dspark_target_layer_ids"),
    ({"dspark_noise_token_id": -1}, "dspark_noise_token_id=-1 is not a token of 512"),
    ({"dspark_block_size": 0}, "dspark_block_size=0; a draft is 1 token or more"),
    ({"dspark_target_layer_ids": (0, 8)}, r"dspark_target_layer_ids=\[0, 8\] names layer 0, which no layer feeds"),
    (
        {"compress_ratios": (0, 2, 2)},
        "compress_ratios lists 3 layers; it must list num_hidden_layers=9 and may list the 2 ",
    ),
    ({"compress_ratios": (0, -2, 2, 2, 1, 1, 1, 1, 1)}, "compress_ratios holds -2"),
    ({"compress_ratios": (0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 1)}, r"of the draft stages are \(0, 1\); they must be 0"),
    ({"kv_source_layer_ids": (3, 1, 4)}, r"kv_source_layer_ids=\[3, 1, 4\] must ascend without repeats"),
    ({"index_source_layer_ids": (1, 3, 3, 4)}, r"index_source_layer_ids=\[1, 3, 3, 4\] must ascend"),
    ({"engram_layer_ids": (1, 9)}, r"engram_layer_ids=\[1, 9\] names a layer outside 0..8"),
    ({"dspark_target_layer_ids": (-1, 8)}, r"dspark_target_layer_ids=\[-1, 8\] names a layer outside 0..8"),
    ({"kv_source_layer_ids": (0, 1, 3, 4)}, "KV source 0 has compress ratio 0"),
    ({"kv_source_layer_ids": (1, 2, 3, 4)}, "KV source 2 is not in index_source_layer_ids"),
    ({"index_source_layer_ids": (0, 1, 3, 4)}, "index source 0 has compress ratio 0"),
    ({"kv_source_layer_ids": (3, 4)}, "layer 1 has ratio 2 but no KV source at or before it"),
    ({"kv_source_layer_ids": (1, 3)}, "layer 4 has ratio 1, but its KV source 3 has ratio 2"),
    ({"candidate_source_layer_id": 5}, "candidate_source_layer_id=5 is not an index source"),
    ({"candidate_source_layer_id": 3}, "candidate_source_layer_id=3 comes before the last KV source 4"),
    ({"index_topk": 13}, "index_topk=13 exceeds the candidate pool of 3 blocks x 4 = 12 entries"),
]


@pytest.mark.parametrize("changes,message", REFUSED)
def test_refusals_say_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match="config: .*" + message):
        change(**changes)


def test_plain_floats_need_no_weight_groups():
    assert change(hidden_size=80, moe_intermediate_size=48, quantized=False).hidden_size == 80


# ---- schedules


def roles(cfg):
    return [spec.role for spec in layer_plan(cfg)]


def test_roles_of_the_release():
    plan = layer_plan(flash)
    named = collections.defaultdict(list)
    for spec in plan:
        named[spec.role].append(spec.layer)
    assert named[Role.WINDOW] == [0, 1]
    assert named[Role.FULL] == [2, 8, 14, 20]
    assert named[Role.REINDEX] == [24, 28, 32, 36]
    assert len(named[Role.REUSE]) == 30
    assert [spec.ratio for spec in plan] == [0, 0] + [2] * 18 + [1] * 20
    assert [spec.pool for spec in plan] == [None] * 2 + [0] * 6 + [1] * 6 + [2] * 6 + [3] * 20
    assert [spec.layer for spec in plan if spec.builds_candidates] == [20]
    assert [spec.layer for spec in plan if spec.scores_candidates] == [24, 28, 32, 36]
    assert {spec.layer: spec.engram for spec in plan if spec.engram is not None} == {1: 0, 14: 1}
    assert [spec.layer for spec in plan if spec.decoder] == list(range(20, 40))
    assert (flash.pool_size, flash.first_decoder_layer, flash.decoder_tail) == (16384, 20, 2541)


def test_roles_of_tiny():
    W, F, X, U = Role.WINDOW, Role.FULL, Role.REINDEX, Role.REUSE
    assert roles(tiny) == [W, F, U, F, F, U, X, U, X]
    assert [spec.pool for spec in layer_plan(tiny)] == [None, 0, 0, 1, 2, 2, 2, 2, 2]


BARE = {
    "engram_layer_ids": (), "engram_num_embeddings": (), "num_nextn_predict_layers": 0, "dspark_target_layer_ids": (),
}  # fmt: skip
LEGAL = {
    "no candidate pool": {"candidate_source_layer_id": None},
    "no compressed layer": {"compress_ratios": (0,) * 9, "kv_source_layer_ids": (), "index_source_layer_ids": (),
                            "candidate_source_layer_id": None},
    "one layer": {"num_hidden_layers": 1, "compress_ratios": (1,), "kv_source_layer_ids": (0,),
                  "index_source_layer_ids": (0,), "candidate_source_layer_id": 0, **BARE},
    "one window layer": {"num_hidden_layers": 1, "compress_ratios": (0,), "kv_source_layer_ids": (),
                         "index_source_layer_ids": (), "candidate_source_layer_id": None, **BARE},
    "the candidate source is a Reindex layer": {"candidate_source_layer_id": 6},
    "the candidate source is the last indexer": {"candidate_source_layer_id": 8},
    "all layers are Full": {"compress_ratios": (2,) * 9, "kv_source_layer_ids": tuple(range(9)),
                            "index_source_layer_ids": tuple(range(9)), "candidate_source_layer_id": 8},
    "one source, all Reindex": {"compress_ratios": (4,) * 9, "kv_source_layer_ids": (0,),
                                "index_source_layer_ids": tuple(range(9)), "candidate_source_layer_id": 0},
    "ratios that ascend": {"compress_ratios": (1, 1, 1, 2, 2, 2, 3, 3, 3), "kv_source_layer_ids": (0, 3, 6),
                           "index_source_layer_ids": (0, 3, 6), "candidate_source_layer_id": 6},
    "window layers between": {"compress_ratios": (0, 2, 0, 2, 0, 1, 0, 1, 0), "kv_source_layer_ids": (1, 5),
                              "index_source_layer_ids": (1, 3, 5, 7), "candidate_source_layer_id": 5},
    "a large ratio and a window of one": {"compress_ratios": (0, 128, 128, 128, 1, 1, 1, 1, 1), "sliding_window": 1},
    "no engram, no drafts": {"compress_ratios": tiny.compress_ratios[:9], **BARE},
    "three streams": {"hc_mult": 3},
    "sizes off their defaults at once": {"index_topk": 256, "candidate_topk_blocks": 86, "candidate_block_size": 3,
                                         "sliding_window": 7, "compress_ratios": (0, 3, 3, 3, 1, 1, 1, 1, 1, 0, 0)},
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_legal_schedules(name):
    cfg = change(**LEGAL[name])
    plan, source = layer_plan(cfg), cfg.candidate_source_layer_id
    assert [spec.layer for spec in plan] == list(range(cfg.num_hidden_layers))
    pools = scores = 0
    for spec in plan:
        assert (spec.role is Role.WINDOW) == (spec.ratio == 0) == (spec.pool is None)
        pools += spec.role is Role.FULL
        if spec.pool is not None:
            assert spec.pool == pools - 1  # the nearest KV source at or before it
            assert cfg.compress_ratios[cfg.kv_source_layer_ids[spec.pool]] == spec.ratio
        indexes = spec.layer in cfg.index_source_layer_ids
        assert indexes == (spec.role in (Role.FULL, Role.REINDEX))
        assert spec.builds_candidates == (spec.layer == source)
        assert spec.scores_candidates == (indexes and source is not None and spec.layer > source)
        scores += indexes
    assert (pools, scores) == (len(cfg.kv_source_layer_ids), len(cfg.index_source_layer_ids))
    assert config_json.from_json(json.loads(json.dumps(config_json.to_json(cfg)))) == cfg


def test_group_multiple():
    assert [config.group_multiple(cfg) for cfg in (flash, change(**LEGAL["ratios that ascend"]))] == [2, 6]
    assert config.group_multiple(change(**LEGAL["no compressed layer"])) == 1


def test_lists_become_tuples_and_configs_hash():
    listed = change(compress_ratios=list(tiny.compress_ratios), kv_source_layer_ids=[1, 3, 4])
    assert listed == tiny and hash(listed) == hash(tiny)


# ---- config.json


def released_json():
    return json.loads((GOLDEN / "tiny-f32" / "config.json").read_text())


def test_the_tiny_release_is_the_preset():
    assert config_json.load_config(GOLDEN / "tiny-f32") == dataclasses.replace(tiny, quantized=False)
    assert config_json.load_config(GOLDEN / "tiny-f32" / "config.json") == dataclasses.replace(tiny, quantized=False)


def test_defaults_are_the_release():
    assert Config() == flash


@pytest.mark.parametrize("cfg", [flash, tiny], ids=["flash", "tiny"])
def test_round_trip(cfg):
    text = json.dumps(config_json.to_json(cfg))
    assert config_json.from_json(json.loads(text)) == cfg
    assert config_json.to_json(config_json.from_json(json.loads(text))) == json.loads(text) | config_json.to_json(cfg)


def test_flat_and_composite_files_read_alike():
    composite = released_json()
    text = composite.pop("text_config")
    assert config_json.from_json({**composite, **text}) == config_json.from_json(released_json())


def test_unknown_keys_are_ignored_and_optional_ones_may_lack():
    source = released_json()
    source["text_config"]["attention_dropout"] = 0.0
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        del source[name]
    del source["text_config"]["candidate_source_layer_id"]
    cfg = config_json.from_json(source)
    assert cfg.candidate_source_layer_id is None
    assert cfg.gate_temp == 1.0


def text_config(**changes):
    source = released_json()
    source["text_config"].update(changes)
    return source


def without(*names):
    source = released_json()
    for name in names:
        del source["text_config"][name]
    return source


QUANTIZATION = config_json.to_json(tiny)["quantization_config"]
BAD_FILES = [
    (without("index_topk"), "config.json lacks index_topk"),
    (without("hc_mult", "engram_n_heads"), "config.json lacks hc_mult, engram_n_heads"),
    (text_config(n_shared_experts=2), "n_shared_experts=2; this architecture has only 1"),
    (text_config(hidden_act="gelu"), "hidden_act='gelu'; this architecture has only 'silu'"),
    (text_config(tie_word_embeddings=True), "tie_word_embeddings=True"),
    (text_config(rope_scaling={"rope_type": "linear", "factor": 2}), "rope_scaling.rope_type='linear'; only 'yarn'"),
    (text_config(rope_scaling={"type": "yarn", "factor": 2}), "rope_scaling lacks beta_fast, beta_slow, original_max"),
    (text_config(index_topk=13), "index_topk=13 exceeds the candidate pool"),
    (
        released_json() | {"quantization_config": QUANTIZATION | {"weight_block_size": [128, 128]}},
        r"weight_block_size=\[128, 128\]; the released layout has \[32, 32\]",
    ),
]


@pytest.mark.parametrize("source,message", BAD_FILES)
def test_bad_files_are_refused(source, message):
    with pytest.raises(ValueError, match="config: .*" + message):
        config_json.from_json(source)


@pytest.mark.parametrize("key", QUANTIZATION)
def test_every_key_of_the_quantisation_is_checked(key):
    source = released_json() | {"quantization_config": {k: v for k, v in QUANTIZATION.items() if k != key}}
    with pytest.raises(ValueError, match=rf"quantization_config\.{key}=None"):
        config_json.from_json(source)


def test_no_yarn_and_presence_of_vision_and_quantisation():
    source = text_config(rope_scaling=None) | {"vision_config": {"depth": 3}, "quantization_config": QUANTIZATION}
    cfg = config_json.from_json(source)
    assert (cfg.rope_scaling, cfg.vision, cfg.quantized) == (None, True, True)
    assert config_json.from_json(config_json.to_json(cfg)) == cfg


def test_files_that_are_not_there_or_not_json(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        config_json.load_config(tmp_path / "config.json")
    with pytest.raises(ValueError, match="does not exist; give a checkpoint directory"):
        config_json.load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        config_json.load_config(tmp_path)
