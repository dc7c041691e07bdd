"""Mistakes in ports of published decoders, most of them reported in public, with the report's address."""

from dataclasses import replace

from torch import Tensor

from benchmarks.diff.fresh.planting import (
    Mistake,
    at,
    both,
    gain,
    head_is_embedding,
    permuted,
    read_flat,
    swap,
)

M = Mistake
Row = tuple[str, str, tuple[Mistake, ...]]
FULL = M("rotary width", "all attention", {"turned": 12}, None, "ml-explore/mlx-lm/pull/1698")
HALVES = M("rotary layout", "all attention", {"pairs": False}, None, "ggml-org/llama.cpp/pull/6033")
NO_BIAS = M("bias", "all attention", {"qkv_bias": False}, None, "sbryngelson/ANEForge/pull/253")
BASE = M("rotary base", "all attention", {"base": 1e4}, None, "lyogavin/airllm/pull/369")
ROWS: list[Row] = [
    ("GPT-NeoX", "fused", (M("parallel", "layers", {"parallel": False}, None, "ggml-org/ggml/pull/139"),)),
    (
        "GPT-NeoX",
        "einsum",
        (M("order of q, k, v", "all attention", {}, read_flat(4, 18, 3), "lablup/mlxcel/pull/928"),),
    ),
    ("GPT-NeoX", "split", (replace(FULL, options={"turned": 18}),)),
    ("GPT-NeoX", "split", (M("scaled weights", "mlp 0", {}, at("0.down", lambda w: w / 6**0.5)),)),
    ("Phi", "fused", (M("activation", "all mlp", {"act": "gelu"}, None, "kyutai-labs/pocket-tts/pull/278"),)),
    (
        "Phi",
        "einsum",
        (M("ε", "all", {"eps": 1e-7}, None, "mindspore-lab/mindone/pull/219"),),
    ),
    ("Phi", "split", (M("head bias", "last", {"head_bias": False}),)),
    (
        "Falcon",
        "fused",
        (M("rotary layout", "all attention", {"pairs": True}, None, "ooples/AiDotNet/pull/2074"),),
    ),
    (
        "Falcon",
        "einsum",
        (M("attention scale", "all attention", {"scale": 1 / 8}, None, "lucidrains/vit-pytorch/issues/65"),),
    ),
    (
        "StableLM",
        "split",
        (M("norm kind", "all", {"norm": "rms", "norm_bias": False}, None, "ggml-org/llama.cpp/pull/6033"),),
    ),
    (
        "StableLM",
        "fused",
        (M("gate and up", "all mlp", {"up_first": True}, None, "ml-explore/mlx-lm/pull/767"),),
    ),
    (
        "StableLM",
        "einsum",
        (M("tied head", "last", {"tied": True}, head_is_embedding, "pegainfer-project/pegainfer/pull/544"),),
    ),
    ("Qwen2", "fused", (NO_BIAS,)),
    ("Qwen2", "split", (BASE,)),
    (
        "Qwen2",
        "einsum",
        (M("groups of heads", "all attention", {"tile": True}, None, "ekzhang/jax-js/pull/180"),),
    ),
    (
        "Qwen2",
        "split",
        (M("dropout", "all attention", {"drop": 0.1}, None, "pytorch/pytorch/issues/124464"),),
    ),
    (
        "Qwen2",
        "fused",
        (
            M(
                "rotary layout of the checkpoint",
                "all attention",
                {},
                permuted(10, "", ".b"),
                "rasbt/LLMs-from-scratch/pull/750",
            ),
        ),
    ),
    (
        "Qwen3",
        "split",
        (
            M(
                "norm and rotation",
                "all attention",
                {"qk": "late"},
                None,
                "meta-pytorch/torchtune/issues/2809",
            ),
        ),
    ),
    (
        "Qwen3",
        "fused",
        (M("QK-norm", "all attention", {"qk": ""}, None, "vllm-project/vllm-metal/pull/659"),),
    ),
    ("Qwen3", "einsum", (M("ε", "all", {"eps": 1e-5}, None, "Wenyueh/MinivLLM/pull/82"),)),
    (
        "Mistral",
        "split",
        (M("window", "all attention", {"window": 13}, None, "huggingface/transformers/issues/39408"),),
    ),
    (
        "Mistral",
        "fused",
        (
            M(
                "causal mask",
                "attention 2",
                {"mask": "flipped"},
                None,
                "rasbt/LLMs-from-scratch/pull/1062",
            ),
        ),
    ),
    (
        "Mistral",
        "einsum",
        (M("groups of heads", "attention 1", {"tile": True}, None, "onnx/onnx/pull/7274"),),
    ),
    (
        "Granite",
        "fused",
        (M("branch scale", "layers", {"branch": 1.0}, None, "OpenNMT/CTranslate2/pull/1882"),),
    ),
    (
        "Granite",
        "split",
        (M("head scale", "last", {"logits": 8.0}, None, "unslothai/unsloth/pull/1218"),),
    ),
    (
        "Granite",
        "einsum",
        (M("attention scale", "all attention", {"scale": None}, None, "lablup/mlxcel/pull/254"),),
    ),
    ("Cohere", "fused", (HALVES,)),
    ("Cohere", "split", (M("head scale", "last", {"logits": 1.0}, None, "unslothai/unsloth/pull/11277"),)),
    (
        "Cohere",
        "einsum",
        (M("norm kind", "all", {"norm": "rms"}, None, "ggml-org/llama.cpp/pull/6033"),),
    ),
    (
        "StarCoder2",
        "fused",
        (M("bias", "layers", {"o_bias": False, "mlp_bias": False}, None, "mlc-ai/mlc-llm/pull/3494"),),
    ),
    (
        "StarCoder2",
        "split",
        (M("transposed weights", "attention 1", {}, at("1.o", Tensor.t), "nntile/nntile/pull/402"),),
    ),
    ("StarCoder2", "fused", (M("stop-gradient", "attention 1", {"cut": True}),)),
    (
        "GPT-J",
        "einsum",
        (replace(FULL, options={"turned": 8}, source="AI-Hypercomputer/maxtext/issues/4616"),),
    ),
    ("GPT-J", "fused", (M("activation", "mlp 1", {"act": "relu"}),)),
    ("OPT", "fused", (M("positions", "first", {"table": 0}, None, "EleutherAI/gpt-neox/pull/650"),)),
    ("OPT", "split", (M("final norm", "last", {"final": False}, None, "OpenNMT/CTranslate2/pull/850"),)),
    ("OPT", "einsum", (M("activation", "all mlp", {"act": "gelu"}),)),
    (
        "BLOOM",
        "fused",
        (M("slopes", "all attention", {"slopes": "plain"}, None, "ml-explore/mlx/pull/3071"),),
    ),
    ("BLOOM", "einsum", (M("embedding norm", "first", {"emb_norm": False}),)),
    (
        "BLOOM",
        "split",
        (M("residual", "layer 1", {"source": "normed"}, None, "SHI-Labs/Compact-Transformers/issues/25"),),
    ),
    ("MPT", "split", (M("slopes", "all attention", {"slopes": "late"}, None, "paiml/aprender/pull/2143"),)),
    (
        "MPT",
        "fused",
        (M("causal mask", "all attention", {"mask": "none"}, None, "paiml/entrenar/issues/310"),),
    ),
    ("MPT", "einsum", (M("order of q, k, v", "attention 0", {}, swap("0.q", "0.k", "0.v")),)),
    (
        "GPT-Neo",
        "split",
        (
            M(
                "attention scale",
                "all attention",
                {"scale": None},
                None,
                "huggingface/transformers/issues/20828",
            ),
        ),
    ),
    (
        "GPT-Neo",
        "fused",
        (M("window", "all attention", {"layers": {0: {"window": 10}, 2: {"window": 10}}}),),
    ),
    (
        "SmolLM3",
        "split",
        (M("no rotation", "attention 3", {"layers": {}}, None, "pytorch/executorch/issues/22043"),),
    ),
    (
        "SmolLM3",
        "fused",
        (
            M(
                "no rotation",
                "all attention",
                {"layers": {i: {"turned": 0} for i in range(3)}},
                None,
                "huggingface/transformers/issues/43756",
            ),
        ),
    ),
    ("Gemma", "split", (M("gain + 1", "all", {"plus": 0.0}, None, "linkedin/Liger-Kernel/issues/74"),)),
    (
        "Gemma",
        "fused",
        (
            M(
                "gain of the checkpoint",
                "all",
                {},
                both(gain("n1.w", 1.0), gain("n2.w", 1.0), gain("final.w", 1.0)),
                "utensils/mold/pull/1078",
            ),
        ),
    ),
    (
        "Gemma",
        "einsum",
        (M("gain of the checkpoint", "last", {}, gain("final.w", -1.0), "kekzl/imp/pull/1289"),),
    ),
    ("Gemma", "einsum", (M("embedding scale", "first", {"emb": 36.0}),)),
    ("Nemotron", "fused", (M("activation", "all mlp", {"act": "relu"}),)),
    ("Nemotron", "split", (M("gain + 1", "layer 1", {"plus": 0.0}),)),
    ("GLM", "fused", (FULL,)),
    ("GLM", "split", (HALVES,)),
    ("Phi-3", "einsum", (M("order of q, k, v", "attention 0", {}, swap("0.k", "0.v")),)),
    ("Phi-3", "split", (M("gate and up", "mlp 1", {}, swap("1.gate", "1.up")),)),
]
"""Published decoders, styles of ports and one mistake each."""
TWO: list[Row] = [
    (
        "Granite",
        "split",
        (
            M("embedding scale", "first", {"emb": 1.0}, None, "OpenNMT/CTranslate2/pull/1882"),
            M("head scale", "last", {"logits": 1.0}, None, "dphnAI/sonar/pull/1054"),
        ),
    ),
    ("GLM", "einsum", (FULL, M("activation", "mlp 1", {"act": "gelu"}))),
    ("Qwen2", "split", (M("bias", "attention 0", {"qkv_bias": False}), M("ε", "layer 2", {"eps": 1e-3}))),
    (
        "OPT",
        "split",
        (
            M("positions", "first", {"table": 0}, None, "huggingface/transformers/issues/20761"),
            M("final norm", "last", {"final": False}, None, "OpenNMT/CTranslate2/pull/850"),
        ),
    ),
    (
        "BLOOM",
        "split",
        (M("embedding norm", "first", {"emb_norm": False}), M("activation", "mlp 1", {"act": "relu"})),
    ),
    (
        "SmolLM3",
        "einsum",
        (M("gate and up", "mlp 0", {"up_first": True}), M("no rotation", "attention 3", {"turned": 8})),
    ),
    (
        "Mistral",
        "fused",
        (M("window", "attention 0", {"window": None}), M("activation", "mlp 2", {"act": "gelu"})),
    ),
    (
        "Gemma",
        "split",
        (M("embedding scale", "first", {"emb": 1.0}), M("gain + 1", "layer 1", {"plus": 0.0})),
    ),
    ("Cohere", "split", (HALVES, M("head scale", "last", {"logits": 1 / 16}))),
    (
        "GPT-Neo",
        "einsum",
        (M("attention scale", "attention 0", {"scale": None}), M("bias", "mlp 3", {"mlp_bias": False})),
    ),
]
"""Decoders with two mistakes, in the order of the forward pass."""
HALF_SPAN = M("window", "attention 1, attention 2", {"spans": (None, 12, 12, None)})
OTHERS: list[tuple[str, tuple[Mistake, ...]]] = [
    ("RoBERTa", (M("positions", "first", {"pad": None}, None, "sbryngelson/ANEForge/pull/257"),)),
    ("RoBERTa", (M("ε", "everywhere", {"eps": 1e-12}, None, "huggingface/transformers/pull/585"),)),
    ("RoBERTa", (M("embedding part", "first", {"kinds": False}),)),
    ("DistilBERT", (M("placement", "layers", {"before": True}, None, "NVIDIA-NeMo/Speech/pull/4350"),)),
    ("DistilBERT", (M("activation", "all mlp", {"act": "tanh"}),)),
    ("DistilBERT", (M("activation", "last", {"head_act": "relu"}),)),
    ("ModernBERT", (replace(HALF_SPAN, source="keras-team/keras-hub/pull/2518"),)),
    (
        "ModernBERT",
        (
            M(
                "rotary base",
                "attention 1, attention 2",
                {"bases": (160000.0,) * 4},
                None,
                "NVIDIA/TensorRT-Model-Connect/pull/692",
            ),
        ),
    ),
    ("ModernBERT", (M("gate and up", "all mlp", {"swapped": True}),)),
    (
        "DeiT",
        (M("activation", "all mlp", {"act": "quick"}, None, "huggingface/pytorch-image-models/issues/2031"),),
    ),
    ("DeiT", (M("ε", "all", {"eps": 1e-5}, None, "mindspore-lab/mindone/pull/225"),)),
    ("DeiT", (M("pooling", "last", {"pool": "mean"}),)),
    ("DINOv2", (M("layer scale", "layers", {"soft": False}, None, "riccardomusmeci/mlx-image/pull/26"),)),
    (
        "DINOv2",
        (M("attention scale", "all attention", {"scale": 40**-0.5}, None, "rezazad68/TMUnet/issues/13"),),
    ),
    ("BART", (M("positions", "first", {"first": 0}, None, "huggingface/transformers/issues/13481"),)),
    ("BART", (M("embedding scale", "first", {"emb": 48**0.5}),)),
    ("Marian", (M("embedding scale", "first", {"emb": 1.0}, None, "OpenNMT/CTranslate2/pull/1760"),)),
    (
        "Marian",
        (
            M(
                "activation",
                "all mlp, all d-mlp",
                {"act": "relu"},
                None,
                "huggingface/transformers/pull/16300",
            ),
        ),
    ),
    ("Pegasus", (M("final norm", "last", {"final": False}),)),
    ("Pegasus", (M("causal mask", "all d-attention", {"causal": False}, None, "paiml/entrenar/issues/310"),)),
    ("RoBERTa", (M("positions", "first", {"pad": None}), M("activation", "all mlp", {"act": "tanh"}))),
    ("ModernBERT", (HALF_SPAN, M("activation", "last", {"head_act": "relu"}))),
    ("DeiT", (M("activation", "all mlp", {"act": "tanh"}), M("pooling", "last", {"pool": "mean"}))),
    ("Pegasus", (M("embedding scale", "first", {"emb": 1.0}), M("final norm", "last", {"final": False}))),
    ("DINOv2", (M("layer scale", "layers", {"soft": False}), M("final norm", "last", {"final": False}))),
]
"""Encoders, image models and translators, with one mistake or two."""
