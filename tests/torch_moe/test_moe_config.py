"""Model configuration: what is refused, what is derived."""

from __future__ import annotations

import json

import pytest

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.model.config import MoEConfig

SMALL = {
    "vocab_size": 16,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "top_k": 2,
    "expert_size": 24,
}


def test_derived_sizes_and_round_trip():
    config = MoEConfig(**SMALL, dense_layers=[1], dense_size=40)
    assert (config.moe_layers, config.num_moe_layers, config.expert_parameters) == ((0, 2), 2, 3 * 32 * 24)
    assert MoEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, "vocab_size: expected an integer of at least 1, found 0"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 9}, "top_k: 9 of 8"),
        ({"num_kv_heads": 3}, "num_heads: 4 is no multiple of 3"),
        ({"head_dim": 7}, "head_dim: 7 must be even"),
        ({"dense_layers": (3,), "dense_size": 4}, r"dense_layers\[0\]: expected a layer in 0..2"),
        ({"dense_layers": (1, 0), "dense_size": 4}, "ascending"),
        ({"dense_layers": 1}, "dense_layers: expected layer indices"),
        ({"dense_layers": (1,)}, "dense_size"),
        ({"num_groups": 3}, "num_groups"),
        ({"num_groups": 8, "num_top_groups": 4}, "two best"),
        ({"num_groups": 4, "num_top_groups": 5}, "num_top_groups: 5 of 4"),
        ({"num_groups": 4, "num_top_groups": 1, "top_k": 3}, "top_k: 3 of 2"),
        ({"router": "tanh"}, "router"),
        ({"shared_gate": True}, "shared_gate"),
        ({"qk_norm": 1}, "qk_norm: expected true or false"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_refusals_name_the_field(changes, words):
    with pytest.raises(InvalidInput, match=words):
        MoEConfig(**SMALL | changes)


def test_unknown_and_missing_fields_are_refused():
    with pytest.raises(InvalidInput, match=r"x\.toml, width: no such field"):
        MoEConfig.from_dict(SMALL | {"width": 1}, where="x.toml")
    with pytest.raises(InvalidInput, match="'top_k'"):
        MoEConfig.from_dict({k: v for k, v in SMALL.items() if k != "top_k"})
