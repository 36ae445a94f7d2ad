"""Laws of the static description: patterns of layers, and stretched rotary positions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from smcjax.model import LayerSpec, Rope, RopeScaling
from smcjax.model.config import LinearScaling
from tests.helpers import tiny_config

SPECS = [LayerSpec(), LayerSpec(qk_norm="head"), LayerSpec(o_bias=True)]


@given(st.lists(st.sampled_from(SPECS), min_size=1, max_size=9))
def test_layers_are_kept_as_their_shortest_pattern(specs: list[LayerSpec]) -> None:
    config = tiny_config().with_layers(specs)
    assert [config.layer(index) for index in range(config.num_layers)] == specs
    shorter = [specs[:size] for size in range(1, len(config.layers))]
    assert all([part[index % len(part)] for index in range(len(specs))] != specs for part in shorter)


def test_linear_scaling_divides_positions_and_llama_3s_some_of_them() -> None:
    plain = Rope(5e5).frequencies(64)
    np.testing.assert_array_equal(Rope(5e5, LinearScaling(8.0)).frequencies(64), plain / 8)
    ratio = plain / Rope(5e5, RopeScaling(8.0, 1.0, 4.0, 8192)).frequencies(64)
    assert (ratio[0], ratio[-1]) == (1.0, 8.0)
    assert np.all(np.diff(ratio) >= 0)
