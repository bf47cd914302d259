"""Weights and configurations of Hugging Face: logits equal to transformers', both ways, under any placement."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402

from routepack_opt.errors import FormatError, InvalidInput  # noqa: E402
from routepack_opt.integrations.torch_moe.huggingface.weights import (  # noqa: E402
    INDEX,
    config_from_hf,
    config_to_hf,
    export_hf,
    load_hf,
)
from routepack_opt.integrations.torch_moe.model.decoder import MoETransformer, build_model  # noqa: E402
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh  # noqa: E402
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap  # noqa: E402
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape  # noqa: E402

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,  # large, so that an error shows
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
QWEN = COMMON | {"head_dim": 8, "moe_intermediate_size": 24, "intermediate_size": 40, "num_experts": 8}
MIXTRAL = COMMON | {"intermediate_size": 24, "num_local_experts": 8}
DOTS = QWEN | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
DOTS |= {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None}
DOTS |= {"layer_types": ["full_attention"] * 2}
DOTS.pop("num_experts")

CASES = {
    "qwen": ("Qwen3Moe", QWEN | {"norm_topk_prob": True}),
    "qwen_unnormalised": ("Qwen3Moe", QWEN | {"norm_topk_prob": False}),
    "qwen_tied": ("Qwen3Moe", QWEN | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen_bias": ("Qwen3Moe", QWEN | {"attention_bias": True, "head_dim": 16}),
    "qwen_dense_layer": ("Qwen3Moe", QWEN | {"mlp_only_layers": [0]}),
    "qwen_window": ("Qwen3Moe", QWEN | {"use_sliding_window": True, "sliding_window": 5}),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral_window": ("Mixtral", MIXTRAL | {"sliding_window": 4, "num_key_value_heads": 1}),
    "mixtral_tied": ("Mixtral", MIXTRAL | {"tie_word_embeddings": True}),
    "dots": ("Dots1", DOTS),
}
FAMILIES = {"Qwen3Moe": "qwen3_moe", "Mixtral": "mixtral", "Dots1": "dots1"}


def hf_model(kind, fields, seed=0):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # norms and biases away from their initial ones and zeros
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    return model


def permuted(config, seed=3):
    generator = np.random.default_rng(seed)
    return SlotMap(np.stack([generator.permutation(config.num_experts) for _ in config.moe_layers]))


def loaded(folder, slot_map=None):
    config = config_from_hf(folder)
    model = build_model(config, ParallelMesh.single(), slot_map=slot_map, seed=None)
    load_hf(model, folder)
    return model


def sequences(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 61, (n,), generator=generator) for n in (7, 1, 12, 3)]


def packed_logits(model, parts):
    borders = torch.tensor([0] + [len(p) for p in parts]).cumsum(0).to(torch.int32)
    with torch.no_grad():
        return model(torch.cat(parts), borders, tape=RouteTape.off())


def hf_logits(model, parts):
    with torch.no_grad():
        return torch.cat([model(part[None]).logits[0] for part in parts])


@pytest.mark.parametrize("case", CASES)
def test_packed_logits_equal_transformers_sequence_by_sequence(case, tmp_path):
    model = hf_model(*CASES[case])
    model.save_pretrained(tmp_path)
    expected = hf_logits(model, sequences())
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(packed_logits(loaded(tmp_path), sequences()), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["qwen", "mixtral", "dots"])
def test_fused_names_of_transformers_5_load_like_hub_names(case, tmp_path):
    model = hf_model(*CASES[case])
    model.config.save_pretrained(tmp_path)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    model.save_pretrained(tmp_path / "hub")
    hub, fused = loaded(tmp_path / "hub"), loaded(tmp_path, permuted(config_from_hf(tmp_path)))
    assert any("experts.0." in name for name in load_file(tmp_path / "hub" / "model.safetensors"))
    torch.testing.assert_close(packed_logits(fused, sequences()), packed_logits(hub, sequences()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_export_loads_in_transformers_with_equal_logits(case, tmp_path):
    kind, fields = CASES[case]
    model = hf_model(kind, fields)
    model.save_pretrained(tmp_path / "in")
    ours = loaded(tmp_path / "in", permuted(config_from_hf(tmp_path / "in")))
    export_hf(ours, tmp_path / "out")
    assert config_from_hf(tmp_path / "out") == ours.config
    again, report = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert torch.equal(hf_logits(again.eval(), sequences()), hf_logits(model, sequences()))


def test_export_in_several_files_with_an_index(tmp_path):
    model = hf_model(*CASES["mixtral"])
    model.save_pretrained(tmp_path / "in")
    export_hf(loaded(tmp_path / "in"), tmp_path / "out", max_file_bytes=20_000)
    table = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files == sorted(set(table["weight_map"].values()))
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(hf_logits(again.eval(), sequences()), hf_logits(model, sequences()))
    assert torch.equal(
        packed_logits(loaded(tmp_path / "out"), sequences()), packed_logits(loaded(tmp_path / "in"), sequences())
    )


def test_bf16_weights_travel_unchanged(tmp_path):
    model = hf_model(*CASES["qwen"]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    config = config_from_hf(tmp_path / "in")
    ours = build_model(config, ParallelMesh.single(), slot_map=permuted(config), dtype=torch.bfloat16, seed=None)
    load_hf(ours, tmp_path / "in")
    export_hf(ours, tmp_path / "out")
    again = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("case", ["qwen", "mixtral"])
def test_apply_then_invert_a_placement_is_the_identity(case, tmp_path):
    hf_model(*CASES[case]).save_pretrained(tmp_path)
    straight = loaded(tmp_path)
    moved = loaded(tmp_path, permuted(straight.config))
    torch.testing.assert_close(
        packed_logits(moved, sequences()), packed_logits(straight, sequences()), atol=1e-6, rtol=1e-6
    )
    for block, other in zip(straight.moe_blocks, moved.moe_blocks, strict=True):
        assert not torch.equal(block.experts.gate_up, other.experts.gate_up)
        slots = moved.slot_map.logical_to_slot[block.moe_layer]
        assert torch.equal(block.experts.gate_up, other.experts.gate_up[slots])
        assert torch.equal(block.experts.down, other.experts.down[slots])
        assert torch.equal(block.router.weight, other.router.weight)


def test_rebalanced_weights_but_logical_ids_used_in_dispatch_is_seen(tmp_path):
    """The classic silent bug: experts moved, tokens still sent to where they were."""
    hf_model(*CASES["qwen"]).save_pretrained(tmp_path)
    straight = loaded(tmp_path)
    moved = loaded(tmp_path, permuted(straight.config))
    for block in moved.moe_blocks:
        block.dispatcher = straight.moe_blocks[0].dispatcher  # its map is the identity: ids reach dispatch unmapped
    difference = (packed_logits(moved, sequences()) - packed_logits(straight, sequences())).abs().max()
    assert difference > 1e-2


def test_one_ep_rank_reads_only_its_slots(tmp_path):
    hf_model(*CASES["qwen"]).save_pretrained(tmp_path)
    whole = loaded(tmp_path)
    slot_map = permuted(whole.config)
    for ep_rank in range(4):
        part = MoETransformer(
            whole.config, slot_map=slot_map, dispatcher=None, num_local_slots=2, first_slot=2 * ep_rank, seed=None
        )
        load_hf(part, tmp_path)
        for block, other in zip(part.moe_blocks, whole.moe_blocks, strict=True):
            experts = part.local_experts(block.moe_layer)
            assert torch.equal(block.experts.gate_up, other.experts.gate_up[experts])
            assert torch.equal(block.experts.down, other.experts.down[experts])


@pytest.fixture
def folder(tmp_path):
    hf_model(*CASES["mixtral"]).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_unknown_and_ill_shaped_tensors_are_refused(folder):
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    kept = load_file(folder / "model.safetensors")
    for change, words in (
        (lambda t: t.pop(name), ["experts.3.down_proj", "missing"]),
        (lambda t: t.update({"model.layers.7.q": torch.zeros(1)}), ["model.safetensors, model.layers.7.q", "no such"]),
        (lambda t: t.update({name: torch.zeros(3, 4)}), [name, "(3, 4)", "(32, 24)"]),
        (lambda t: t.update({name: torch.zeros(32, 24, dtype=torch.int64)}), [name, "I64"]),
    ):
        save_file(kept, folder / "model.safetensors")
        rewrite(folder, change)
        with pytest.raises(FormatError) as error:
            loaded(folder)
        assert str(folder) in str(error.value) and all(word in str(error.value) for word in words)
        assert "\n" not in str(error.value)


def test_weights_of_another_configuration_are_refused(folder):
    config = dataclasses.replace(config_from_hf(folder), rope_theta=5.0)
    model = build_model(config, ParallelMesh.single(), seed=None)
    with pytest.raises(FormatError, match=r"config\.json: rope_theta is 1000\.0, the model has 5\.0"):
        load_hf(model, folder)
    (folder / "config.json").unlink()
    load_hf(model, folder)


def test_files_that_are_no_safetensors_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(FormatError, match=r"model\.safetensors: not a safetensors file"):
        loaded(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match="other formats are not read"):
        loaded(folder)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../secret.safetensors"}, "not a file name"),
        ({"a": "absent.safetensors"}, "no such file"),
        ({"a": "model.safetensors"}, "the index says it is here"),
        (["a"], "expected a table"),
        ({"a": 3}, "expected a table"),
    ],
)
def test_an_index_that_lies_is_refused(folder, weight_map, words):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match=words):
        loaded(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "model_type: 'llama' is not one of"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "32"}, "hidden_size: expected an integer"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not implemented"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"rope_parameters": 3}, "rope_parameters: expected a table"),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1 is not implemented"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"num_experts_per_tok": 9}, "top_k: 9 of 8 experts"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected at least 1"),
    ],
)
def test_configurations_we_cannot_honour_are_refused(changes, words):
    with pytest.raises(FormatError, match=words):
        config_from_hf(MIXTRAL | {"model_type": "mixtral"} | changes)


def test_hub_configurations_of_transformers_4_are_read():
    old = {k: v for k, v in QWEN.items() if k != "rope_parameters"} | {"model_type": "qwen3_moe", "rope_theta": 1e6}
    config = config_from_hf(old | {"rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False})
    assert config.rope_theta == 1e6 and config.sliding_window is None and config.qk_norm


@pytest.mark.parametrize("case", CASES)
def test_configuration_round_trip(case):
    kind, fields = CASES[case]
    config = config_from_hf(fields | {"model_type": FAMILIES[kind]})
    assert config_from_hf(config_to_hf(config)) == config
    assert config_to_hf(config)["model_type"] == FAMILIES[kind]


def test_export_refuses_a_family_that_lacks_a_feature_and_a_full_folder(tmp_path):
    hf_model(*CASES["qwen"]).save_pretrained(tmp_path / "in")
    model = loaded(tmp_path / "in")
    with pytest.raises(InvalidInput, match="mixtral cannot express it, qk_norm is True"):
        export_hf(model, tmp_path / "out", "mixtral")
    with pytest.raises(InvalidInput, match="exists already"):
        export_hf(model, tmp_path / "in")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "shards"), [("qwen", [[3, 1], [0, 2]]), ("mixtral", [[2, 0, 3, 1]])])
def test_load_permute_train_export_reload(case, shards, tmp_path):
    """On 4 ranks: what transformers reloads is what the trainer holds, and what one process would have trained."""
    import huggingface_workers as workers
    from harness import run_ranks

    kind, fields = CASES[case]
    model = hf_model(kind, fields)
    model.save_pretrained(tmp_path / "in")
    kwargs = {"source": str(tmp_path / "in"), "target": str(tmp_path / "trained"), "shards": shards}
    ranks = run_ranks("huggingface_workers:train_and_export", 4, kwargs, timeout_s=180)
    workers.train_and_export(str(tmp_path / "in"), str(tmp_path / "alone"), permute=False)

    first = [workers.window()[0]]
    trained, alone = (
        hf_logits(getattr(transformers, f"{kind}ForCausalLM").from_pretrained(tmp_path / name).eval(), first)
        for name in ("trained", "alone")
    )
    for rank in ranks:
        torch.testing.assert_close(trained, torch.tensor(rank["logits"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(trained, alone, atol=1e-4, rtol=1e-4)
    assert (trained - hf_logits(model, first)).abs().max() > 1e-2  # it did train


@pytest.mark.parametrize("case", ["qwen", "mixtral", "dots"])
def test_one_step_of_training_equals_transformers(case, tmp_path):
    kind, fields = CASES[case]
    theirs = hf_model(kind, fields)
    theirs.save_pretrained(tmp_path / "in")
    ours = loaded(tmp_path / "in", permuted(config_from_hf(tmp_path / "in")))
    parts = sequences()
    borders = torch.tensor([0] + [len(p) for p in parts]).cumsum(0).to(torch.int32)
    losses = [
        ours(torch.cat(parts), borders, tape=RouteTape.off()).log_softmax(-1)[:, 0].sum(),
        sum(theirs(part[None]).logits[0].log_softmax(-1)[:, 0].sum() for part in parts),
    ]
    for model, loss in zip((ours, theirs), losses, strict=True):
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
    export_hf(ours, tmp_path / "out")
    again = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    torch.testing.assert_close(hf_logits(again, parts), hf_logits(theirs, parts), atol=2e-5, rtol=2e-5)
