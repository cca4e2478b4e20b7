"""The estimate of training cost against counts by hand."""

import dataclasses

import numpy as np
from sessions import MICRO

from v41jax import config
from v41jax.training import flops


def test_attention_and_scores_by_hand():
    # Only what differs between two lengths: the products, token by token, layer by layer.
    cfg = dataclasses.replace(MICRO, index_topk=4)

    def products(length):
        total = 0
        for t in range(length):
            for layer in config.layer_plan(cfg):
                rows = min(t + 1, cfg.sliding_window)
                if layer.ratio:
                    visible = (t + 1) // layer.ratio
                    rows += min(visible, 4)
                    if layer.layer in cfg.index_source_layer_ids:
                        seen = min(visible, cfg.pool_size) if layer.scores_candidates else visible
                        total += 2 * seen * cfg.index_n_heads * cfg.index_head_dim
                total += 4 * rows * cfg.num_attention_heads * cfg.head_dim
        return total / length

    got = [flops.forward_flops_per_token(cfg, length=length) for length in (1, 50)]
    np.testing.assert_allclose(got[1] - got[0], products(50) - products(1), rtol=1e-12)


def test_weights_of_one_token_in_the_released_model():
    # 5 % over two operations for each weight a token is multiplied by, the order of the report's active parameters.
    total = flops.forward_flops_per_token(config.v41_flash, length=1)
    chosen = 40 * 7 * 3 * 5120 * 2304  # six routed experts and the shared one
    assert 2 * chosen < total < 2 * 2 * chosen
    assert flops.training_flops_per_token(config.v41_flash, length=1) == 3 * total
    assert flops.utilization(10.0, config.v41_flash, length=1, peak_flops=30 * total) == 1
