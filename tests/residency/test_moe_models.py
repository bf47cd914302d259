"""The eight models: total and active weights add up to the published sizes."""

from __future__ import annotations

import pytest

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.machine.moe_models import PAPER_MODELS, moe_model

# published totals and active weights in billions; embeddings and the language head are outside our count
SIZES = {
    "dbrx": (132, 36),
    "deepseek-v2-lite": (15.7, 2.4),
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37),
    "deepseek-moe-16b": (16.4, 2.8),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "qwen1.5-moe-a2.7b": (14.3, 2.7),
}


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_weights_add_up_to_the_published_size(name: str) -> None:
    model = moe_model(name)
    total = (model.num_layers * model.num_experts * model.expert_weights + model.other_weights) / 1e9
    active = (model.num_layers * model.top_k * model.expert_weights + model.other_weights) / 1e9
    published_total, published_active = SIZES[name]
    assert 0.93 * published_total < total <= 1.001 * published_total
    assert 0.75 * published_active < active <= 1.05 * published_active


def test_unknown_models_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"neither a file nor one of .*dbrx.*qwen1\.5-moe-a2\.7b.*olmoe"):
        moe_model("gpt-5")
