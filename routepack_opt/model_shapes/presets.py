"""Published dimensions, as the fields of each model's Hugging Face ``config.json`` that matter here."""

from __future__ import annotations

from typing import Any

_QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3_MOE
    | {"hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    "qwen3-235b-a22b": _QWEN3_MOE
    | {"hidden_size": 4096, "num_hidden_layers": 94, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    | {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
    "deepseek-v2-lite": {"model_type": "deepseek_v2", "q_lora_rank": None, **_MLA}
    | {"hidden_size": 2048, "num_hidden_layers": 27, "intermediate_size": 10944, "moe_intermediate_size": 1408}
    | {"num_attention_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}
    | {"first_k_dense_replace": 1, "moe_layer_freq": 1},
    "deepseek-v3": {"model_type": "deepseek_v3", "q_lora_rank": 1536, **_MLA}
    | {"hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432, "moe_intermediate_size": 2048}
    | {"num_attention_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}
    | {"first_k_dense_replace": 3, "moe_layer_freq": 1},
    "mixtral-8x7b": {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"sliding_window": None},
    "olmoe": {"model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 1024}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
    "gpt-oss-120b": {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "intermediate_size": 2880}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    | {"num_local_experts": 128, "num_experts_per_tok": 4},
    # Kimi-Linear-48B-A3B: three KDA layers, then one MLA layer; layers are numbered from 1.
    "hybrid-kda-mla": {"model_type": "kimi_linear", "q_lora_rank": None, **_MLA}
    | {"hidden_size": 2304, "num_hidden_layers": 27, "intermediate_size": 9216, "moe_intermediate_size": 1024}
    | {"num_attention_heads": 32, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1}
    | {"first_k_dense_replace": 1, "moe_layer_freq": 1}
    | {
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        }
    },
}
