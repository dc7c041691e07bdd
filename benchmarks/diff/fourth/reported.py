"""Mistakes in the code of the fourth set, by family and styles, with the address of a report."""

from typing import Any

Row = tuple[str, str, dict[str, Any], str]
"""Kind, place, options of the second style, report on GitHub."""
REPORTED: dict[tuple[str, str], tuple[Row, ...]] = {
    ("OPT", "transformers fairseq"): (
        ("positions", "embed", {"start": 0}, "huggingface/transformers/issues/5285"),
    ),
    ("GPT-2", "transformers nanoGPT"): (
        ("activation", "all mlp", {"approximate": "none"}, "kyutai-labs/pocket-tts/pull/278"),
        ("dropout", "all attention", {"left_on": 0.1}, "huggingface/pytorch-image-models/pull/1978"),
        ("final norm", "last", {"is_final": False}, "cellarium-ai/cellarium-ml/pull/263"),
        (
            "residual",
            "all attention",
            {"is_normed_residual": True},
            "Howuhh/faster-trajectory-transformer/issues/3",
        ),
    ),
    ("GPT-2", "nanoGPT Megatron"): (
        ("causal mask", "all attention", {"diagonal": 2}, ""),
        ("ε", "all", {"eps": 1e-07}, "OpenNMT/CTranslate2/pull/951"),
    ),
    ("GPT-2", "transformers Megatron"): (
        ("order of q, k, v", "all attention", {"order": "thirds"}, "NVIDIA/FasterTransformer/pull/68"),
    ),
    ("GPT-2", "transformers Flax"): (("order of heads", "all attention", {"flip": True}, ""),),
    ("BLOOM", "transformers Megatron"): (
        ("slopes", "all attention", {"slopes": "geometric"}, "ml-explore/mlx/pull/3071"),
        ("slopes", "all attention", {"slopes": "zero"}, "paiml/aprender/pull/2143"),
        ("embedding norm", "first", {"embedding_norm": False}, ""),
        (
            "residual",
            "layer 0, layer 1",
            {"post_residual": True},
            "shivanandmn/Knowledge-Tracing-SAINT/issues/6",
        ),
    ),
    ("LLaMA", "transformers Meta"): (
        ("rotary base", "all attention", {"theta": 500000.0}, "lyogavin/airllm/pull/369"),
        ("groups of heads", "all attention", {"tile": True}, "onnx/onnx/pull/7274"),
        ("ε", "all", {"eps": 1e-05}, "mosaicml/llm-foundry/pull/1399"),
        ("placement", "layer 0, layer 1", {"place": "out"}, "NVIDIA-NeMo/Speech/pull/4350"),
    ),
    ("LLaMA", "tutorial Meta"): (("gate and up", "all mlp", {"swap": True}, "ml-explore/mlx-lm/pull/767"),),
    ("LLaMA", "lit-gpt Meta"): (("stop-gradient", "all mlp", {"cut": True}, ""),),
    ("LLaMA", "transformers course"): (
        ("norm kind", "all", {"norm": "layer"}, "huggingface/transformers/pull/31211"),
        ("gradient", "all attention", {"grad": 0.5}, ""),
    ),
    ("LLaMA", "lit-gpt tutorial"): (
        ("rotary layout", "all attention", {"halves": False}, "karpathy/nanochat/issues/264"),
    ),
    ("LLaMA", "transformers lit-gpt"): (
        ("no rotation", "attention 1", {"rope_layers": (0,)}, "huggingface/transformers/issues/43756"),
    ),
    ("Qwen2", "transformers Meta"): (
        ("bias", "all attention", {"bias": False}, "sbryngelson/ANEForge/pull/253"),
    ),
    ("Mistral", "transformers Meta"): (
        ("window", "all attention", {"window": 9}, "huggingface/transformers/issues/39408"),
    ),
    ("Qwen3", "transformers tutorial"): (
        ("QK-norm", "all attention", {"qk_norm": False}, "NeuraLegion/shainet/pull/125"),
    ),
    ("Qwen3", "tutorial lit-gpt"): (("norm and rotation", "all attention", {"qk_after_rope": True}, ""),),
    ("Gemma-2", "transformers lit-gpt"): (
        ("gain + 1", "all", {"norm_unit_offset": False}, "linkedin/Liger-Kernel/issues/74"),
        (
            "logit cap",
            "all attention",
            {"attention_logit_softcapping": None},
            "vllm-project/vllm-metal/issues/665",
        ),
        ("output cap", "head", {"final_logit_softcapping": None}, "tdrussell/qlora-pipe/issues/18"),
        ("embedding scale", "embed", {"scale_embeddings": 48.0}, "TensorAuto/OpenTau/pull/179"),
        (
            "attention scale",
            "all attention",
            {"attention_scores_scalar": None},
            "keras-team/keras-hub/pull/1701",
        ),
        ("activation", "all mlp", {"gelu_approximate": "none"}, "huggingface/transformers/pull/29402"),
    ),
    ("Granite", "transformers lit-gpt"): (
        ("branch scale", "all attention, all mlp", {"residual_scale": 1.0}, "OpenNMT/CTranslate2/pull/1882"),
        ("head scale", "head", {"logit_scale": 1.0}, "unslothai/unsloth/pull/11277"),
    ),
    ("Pythia", "transformers lit-gpt"): (
        ("parallel", "layer 0, layer 1", {"parallel_residual": False}, "ggml-org/ggml/pull/139"),
        ("rotary width", "all attention", {"rotary_percentage": 1.0}, "ml-explore/mlx-lm/pull/1698"),
    ),
    ("Command-R", "transformers PaLM"): (
        ("head scale", "head", {"logit_scale": 0.00390625}, "TransformerLensOrg/TransformerLens/issues/1726"),
        ("rotary layout", "all attention", {"halves": True}, "ggml-org/llama.cpp/pull/6033"),
    ),
    ("GPT-J", "transformers functions"): (
        ("head bias", "head", {"head_bias": False}, ""),
        ("number of heads", "all attention", {"heads": 2}, ""),
    ),
    ("BERT", "transformers textbook"): (
        ("embedding part", "embed", {"types": False}, "mead-ml/mead-baseline/issues/536"),
        ("embedding norm", "first", {"emb_norm": False}, ""),
    ),
    ("BERT", "transformers nn.TransformerEncoder"): (
        ("ε", "everywhere", {"eps": 1e-05}, "huggingface/transformers/pull/585"),
    ),
    ("RoBERTa", "transformers fairseq"): (
        ("positions", "embed", {"start": 0}, "sbryngelson/ANEForge/pull/257"),
    ),
    ("ViT", "transformers timm"): (("ε", "all", {"eps": 1e-05}, "karpathy/makemore/issues/1"),),
    ("ViT", "transformers vit-pytorch"): (
        ("pooling", "head", {"pool": "avg"}, "lucidrains/vit-pytorch/pull/274"),
    ),
    ("DINOv2", "transformers timm"): (
        (
            "layer scale",
            "all attention, all mlp",
            {"layer_scale": False},
            "riccardomusmeci/mlx-image/pull/26",
        ),
    ),
    ("CLIP", "transformers open_clip"): (
        ("activation", "all mlp", {"quick": False}, "mlfoundations/open_clip/issues/771"),
    ),
    ("T5", "transformers port"): (
        ("head scale", "head", {"head_scale": False}, "ml-explore/mlx-examples/pull/591"),
        ("position table", "all decoder", {"both_ways": True}, "huggingface/transformers/issues/7323"),
    ),
    ("translator", "nn.Transformer Annotated Transformer"): (
        ("causal mask", "all decoder", {"above": 2}, ""),
    ),
}
