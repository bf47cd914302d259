"""Cost from model dimensions: hand-computed models, config files, divisions, refusals."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack_opt import synth
from routepack_opt.cost import CostModel, dense_block
from routepack_opt.errors import InvalidInput
from routepack_opt.model_shapes import PRESETS, cost_for_model, model_shape

QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 5120,
    "moe_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def stages(model, token_cap=8192, **sizes):
    return {s.name: (s.alpha, s.beta) for s in cost_for_model(model, token_cap=token_cap, **sizes).stages}


def test_qwen3_30b_a3b_by_hand():
    unit = 3 * 2048 * 768
    projections = 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 32 * 128 * 2048
    assert projections / unit == 4.0
    (alpha, beta) = stages("qwen3-30b-a3b")["full"]
    assert alpha == 48 * 4.0
    assert beta == pytest.approx(48 * 8192 * (32 * (128 + 128) / 2) / unit)
    assert beta / 48 / 8192 == pytest.approx(8.68e-4, rel=1e-3)
    assert stages("qwen3-30b-a3b").keys() == {"full"}


def test_deepseek_v3_by_hand():
    unit = 3 * 7168 * 2048
    query = 7168 * 1536 + 1536 * 128 * (128 + 64)
    keys_values = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    output = 128 * 128 * 7168
    attention = query + keys_values + output
    assert attention == 187_105_280
    shared, dense = 3 * 7168 * 2048, 3 * 7168 * 18432
    (alpha, beta) = stages("deepseek-v3", 16384)["full"]
    assert alpha == pytest.approx((61 * attention + 58 * shared + 3 * dense) / unit)
    assert beta == pytest.approx(61 * 16384 * (128 * (192 + 128) / 2) / unit)


def test_mixtral_by_hand():
    unit = 3 * 4096 * 14336
    (alpha, beta) = stages("mixtral-8x7b", 4096)["full"]
    assert alpha == pytest.approx(32 * (2 * 4096 * 4096 + 2 * 4096 * 1024) / unit)
    assert beta == pytest.approx(32 * 4096 * 32 * 128 / unit)


def test_gpt_oss_windows_are_linear_until_they_cover_the_cap():
    unit = 3 * 2880 * 2880
    projections = 2880 * 64 * 64 * 2 + 2 * 2880 * 8 * 64
    pair = 64 * (64 + 64)
    found = stages("gpt-oss-120b", 8192)
    assert found["sliding"] == pytest.approx((18 * (projections + 128 * pair) / unit, 0.0))
    assert found["full"] == pytest.approx((18 * projections / unit, 18 * 8192 * pair / 2 / unit))
    short = stages("gpt-oss-120b", 128)  # no sample is longer than the window
    assert short.keys() == {"full"}
    assert short["full"] == pytest.approx((36 * projections / unit, 36 * 128 * pair / 2 / unit))


def test_hybrid_kda_mla_by_hand():
    unit = 3 * 2304 * 1024
    width = 32 * 128
    kda = 4 * 2304 * width + 2 * (2304 * 128 + 128 * width) + 2304 * 32 + 3 * width * 4 + 4 * 32 * 128 * 128
    mla = 2304 * 32 * 192 + 2304 * 576 + 512 * 32 * 256 + width * 2304
    shared, dense = 3 * 2304 * 1024, 3 * 2304 * 9216
    found = stages("hybrid-kda-mla")
    assert found["linear"] == pytest.approx(((20 * kda + 19 * shared + dense) / unit, 0.0))
    assert found["full"] == pytest.approx(((7 * mla + 7 * shared) / unit, 7 * 8192 * 32 * 320 / 2 / unit))


def test_gated_delta_net_config():
    unit = 3 * 2048 * 512
    keys, values = 16 * 128, 32 * 128
    delta = 2048 * (2 * keys + 2 * values + 64) + values * 2048 + (2 * keys + values) * 4 + 4 * 32 * 128 * 128
    gated = 2048 * 256 * (3 * 16 + 2 * 2)
    found = stages(QWEN3_NEXT)
    assert found["linear"] == pytest.approx((36 * (delta / unit + 1), 0.0))
    assert found["full"] == pytest.approx((12 * (gated / unit + 1), 12 * 8192 * 16 * 512 / 2 / unit))


def test_dense_block_reproduces_the_published_ratio():
    stage = dense_block(4096, token_cap=8192)
    assert stage.alpha == 24576.0
    for tokens in (1, 100, 8192):
        cost = stage.alpha * tokens / 8192 + stage.beta * (tokens / 8192) ** 2
        assert cost * 8192 == pytest.approx(24576 * tokens + tokens**2)
    published = 24576.0
    for name in PRESETS:  # no MoE stage has that ratio
        for alpha, beta in stages(name, 1).values():
            assert beta == 0 or alpha / beta != pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(
    ("name", "layers", "experts", "top_k"),
    [
        ("qwen3-30b-a3b", 48, 128, 8), ("qwen3-235b-a22b", 94, 128, 8), ("deepseek-v2-lite", 26, 64, 6),
        ("deepseek-v3", 58, 256, 8), ("mixtral-8x7b", 32, 8, 2), ("olmoe", 16, 64, 8), ("gpt-oss-120b", 36, 128, 4),
        ("hybrid-kda-mla", 26, 256, 8),
    ],
)  # fmt: skip
def test_preset_dimensions(name, layers, experts, top_k):
    shape = model_shape(name)
    assert (shape.num_moe_layers, shape.num_experts, shape.top_k) == (layers, experts, top_k)
    assert len(shape.moe_layers) == layers
    assert shape.moe_layers[-1] == len(shape.layers) - 1


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 29.9), ("qwen3-235b-a22b", 233.8), ("deepseek-v3", 669.1), ("mixtral-8x7b", 46.4),
     ("olmoe", 6.7), ("gpt-oss-120b", 115.6), ("hybrid-kda-mla", 48.2)],
)  # fmt: skip
def test_multiply_adds_account_for_the_published_parameters(name, billions):
    """Every weight but embeddings and router is one multiply-add of the formulas: totals must come out."""
    shape = model_shape(name)
    weights = shape.num_moe_layers * shape.num_experts * shape.expert_madds
    weights += sum(layer.attention.token_madds + 3 * shape.hidden * layer.dense_width for layer in shape.layers)
    assert weights / 1e9 == pytest.approx(billions, rel=0.02)


def test_moe_layers_skip_the_dense_ones():
    assert model_shape("deepseek-v3").moe_layers == tuple(range(3, 61))
    odd = PRESETS["qwen3-30b-a3b"] | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert model_shape(odd).moe_layers == (1, 5)
    listed = odd | {"mlp_layer_types": ["dense", "sparse"] * 3}
    assert model_shape(listed).moe_layers == (1, 3, 5)


def test_synthetic_windows_have_the_dimensions_of_their_model():
    for preset, model in (("v3", "deepseek-v3"), ("qwen3-30b", "qwen3-30b-a3b"), ("qwen3-30b-long", "qwen3-30b-a3b")):
        shape, window = model_shape(model), synth.PRESETS[preset]
        assert (window.num_layers, window.num_experts, window.top_k) == (
            shape.num_moe_layers, shape.num_experts, shape.top_k,
        )  # fmt: skip


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_config_file_folder_dict_and_preset_agree(name, tmp_path):
    extra = {"vocab_size": 1000, "torch_dtype": "bfloat16", "rope_scaling": {"type": "yarn"}}
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[name] | extra))
    wanted = CostModel.for_model(name, token_cap=8192)
    before = copy.deepcopy(PRESETS[name])
    for model in (tmp_path / "config.json", str(tmp_path / "config.json"), tmp_path, PRESETS[name],
                  model_shape(name), {"model_type": "wrapper", "text_config": PRESETS[name]}):  # fmt: skip
        assert CostModel.for_model(model, token_cap=8192) == wanted
    assert PRESETS[name] == before


def test_unknown_family_with_generic_fields_is_read():
    config = PRESETS["qwen3-30b-a3b"] | {"model_type": "some_new_moe"}
    assert stages(config) == stages("qwen3-30b-a3b")
    latent = PRESETS["deepseek-v3"] | {"model_type": "some_new_mla"}
    assert stages(latent) == stages("deepseek-v3")


def test_sliding_window_settings():
    mixtral = PRESETS["mixtral-8x7b"]
    assert stages(mixtral | {"sliding_window": 4096}).keys() == {"sliding"}
    assert stages(mixtral | {"sliding_window": 4096, "use_sliding_window": False}).keys() == {"full"}
    part = stages(mixtral | {"sliding_window": 4096, "max_window_layers": 30})
    assert part["full"] == pytest.approx(tuple(30 / 32 * x for x in stages("mixtral-8x7b")["full"]))


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 65536))
def test_parallel_sizes_divide(name, tp, cp, etp, cap):
    whole, split = cost_for_model(name, token_cap=cap), cost_for_model(name, token_cap=cap, tp=tp, cp=cp, etp=etp)
    assert split.expert_weight == pytest.approx(1 / etp)
    assert [s.name for s in split.stages] == [s.name for s in whole.stages]
    for one, part in zip(whole.stages, split.stages, strict=True):
        assert (part.alpha, part.beta) == pytest.approx((one.alpha / tp / cp, one.beta / tp / cp))


@given(st.sampled_from(sorted(PRESETS)), st.integers(200, 30000))
def test_cost_is_the_multiply_adds_whatever_the_cap(name, tokens):
    """alpha*T + beta*Q times C does not depend on the cap C, so every cap ranks layouts alike."""
    found = []
    for cap in (32768, 65536):
        parts = cost_for_model(name, token_cap=cap).stages
        found.append(sum(s.alpha * tokens / cap + s.beta * (tokens / cap) ** 2 for s in parts) * cap)
    assert found[0] == pytest.approx(found[1])


def test_sync_is_passed_on():
    assert CostModel.for_model("olmoe", token_cap=8, sync="row").sync == "row"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3-30b-a3b", {"hidden_size": None}, "'hidden_size': is missing; expected an integer >= 1"),
        ("qwen3-30b-a3b", {"hidden_size": "2048"}, "'hidden_size': '2048' is not an integer"),
        ("qwen3-30b-a3b", {"num_hidden_layers": 0}, "'num_hidden_layers': 0 is not an integer >= 1"),
        ("qwen3-30b-a3b", {"num_experts": True}, "'num_experts': True is not"),
        ("qwen3-30b-a3b", {"num_experts": None}, "'num_experts': is missing .nor 'n_routed_experts'"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "'num_experts_per_tok': 129 is above the 128 experts"),
        ("qwen3-30b-a3b", {"moe_intermediate_size": 76.8}, "'moe_intermediate_size': 76.8 is not"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0, "x"]}, "'mlp_only_layers'"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [3], "intermediate_size": None}, "'intermediate_size': is missing"),
        ("qwen3-30b-a3b", {"mlp_only_layers": list(range(48))}, "no layer has experts"),
        ("qwen3-30b-a3b", {"layer_types": ["full_attention"] * 47}, "'layer_types': expected a list of 48"),
        ("qwen3-30b-a3b", {"layer_types": ["full_attention", "mamba"] * 24}, r"'layer_types\[1\]': 'mamba' is unknown"),
        ("qwen3-30b-a3b", {"layer_types": ["full_attention", ["x"]] * 24}, r"'layer_types\[1\]'"),
        ("qwen3-30b-a3b", {"use_sliding_window": "no", "sliding_window": 5}, "'use_sliding_window': 'no' is not true"),
        ("mixtral-8x7b", {"num_attention_heads": 33}, "'head_dim': is missing and hidden_size 4096 is no multiple"),
        ("gpt-oss-120b", {"sliding_window": None}, "'sliding_window': is missing"),
        ("deepseek-v3", {"index_topk": 2048}, "'index_topk': sparse attention over indexed tokens is not modelled"),
        ("deepseek-v3", {"kv_lora_rank": None}, "'kv_lora_rank': is missing"),
        ("deepseek-v3", {"model_type": None}, "'model_type': is missing"),
        ("hybrid-kda-mla", {"linear_attn_config": []}, "'linear_attn_config': expected an object"),
        ("hybrid-kda-mla", {"linear_attn_config": {}}, "linear_attn_config: field 'kda_layers': is missing"),
        ("hybrid-kda-mla", {"num_hidden_layers": 28}, "'kda_layers': with full_attn_layers must name each layer 1..28"),
    ],
)  # fmt: skip
def test_bad_configs_name_file_and_field(name, change, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS[name] | change))
    with pytest.raises(InvalidInput, match=message) as caught:
        cost_for_model(path, token_cap=8192)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (name, field) for name in sorted(PRESETS) for field in PRESETS[name]
        if field not in ("decoder_sparse_step", "moe_layer_freq")  # 1 in every config
        and (name, field) != ("mixtral-8x7b", "sliding_window")  # null
        and not (name.startswith("qwen3") and field == "intermediate_size")  # no dense layer
    ],
)  # fmt: skip
def test_a_missing_field_is_refused_by_name(name, field):
    config = {key: value for key, value in PRESETS[name].items() if key != field}
    with pytest.raises(InvalidInput, match=f"config: field .*'{field}'"):
        cost_for_model(config, token_cap=8192)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="'qwen4' is neither a file nor one of qwen3-30b-a3b"):
        cost_for_model("qwen4", token_cap=8192)
    with pytest.raises(InvalidInput, match=r"absent.json: cannot be read"):
        cost_for_model(str(tmp_path / "absent.json"), token_cap=8192)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(InvalidInput, match=r"list.json: expected a JSON object"):
        cost_for_model(tmp_path / "list.json", token_cap=8192)
    (tmp_path / "torn.json").write_text('{"hidden_size": 20')
    with pytest.raises(InvalidInput, match=r"torn.json: not valid JSON"):
        cost_for_model(tmp_path / "torn.json", token_cap=8192)


@pytest.mark.parametrize("sizes", [{"token_cap": 0}, {"tp": 0}, {"cp": -1}, {"etp": 1.5}, {"tp": True}])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(InvalidInput, match=f"{next(iter(sizes))}: .* is not a positive integer"):
        cost_for_model("olmoe", **({"token_cap": 8192} | sizes))
