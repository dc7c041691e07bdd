"""A labelled model type of transformers, and the tiny configurations that several share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from readings import StackReading
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from benchmarks.hf.small import built

VOCABULARY = 260


@dataclass(frozen=True)
class HFModel:
    """A model type, its options, its inputs, and its expected reading.

    Attributes:
        name: unique, the test's id.
        inputs: "text", "seq2seq", "image", "waveform", "spectrogram", or "made": configuration and batch are
            those of `benchmarks.hf.small`.
        unread: whether something must be said in `unread`; None where both are right.
        one_stream: False where the stacks are not compared, only the blocks in order.
        scheme: catalogue name every branch must carry; None is not compared.
        readable: False where the reading must say that parts are not read, whatever it gives.
    """

    name: str
    model_type: str
    options: Mapping[str, Any]
    stacks: tuple[StackReading, ...]
    inputs: str = "text"
    unread: bool | None = False
    one_stream: bool = True
    scheme: str | None = None
    readable: bool = True

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model with random weights in eval mode, and a batch of two."""
        if self.inputs == "made":
            return built(self.model_type, self.options)
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.model_type, **self.options)
        model = _head(config)._from_config(config).eval()
        return model, _batch(self.inputs, config)


def _head(config: Any) -> Any:
    """The class with a head where there is one: an encoder-decoder then runs both stacks."""
    both = (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    )
    mappings = (
        *(both if getattr(config, "is_encoder_decoder", False) else ()),
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        modeling_auto.MODEL_MAPPING,
    )
    found = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    return found[0] if isinstance(found, tuple) else found


def _batch(inputs: str, config: Any) -> dict[str, Tensor]:
    def ids(length: int) -> Tensor:
        return torch.randint(5, 200, (2, length))

    if inputs == "image":
        return {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}
    if inputs == "waveform":
        return {"input_values": torch.randn(2, 800)}
    if inputs == "spectrogram":
        frames = 2 * config.max_source_positions
        features = torch.randn(2, config.num_mel_bins, frames)
        return {"input_features": features, "decoder_input_ids": ids(8)}
    if inputs == "seq2seq":
        return {"input_ids": ids(16), "decoder_input_ids": ids(8)}
    return {"input_ids": ids(16)}


LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
}
NEOX = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "head_dim")}
BERT = NEOX
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
GPTJ = {**GPT, "rotary_dim": 4}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": VOCABULARY}
MIXTURE = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALPHA_BETA = {
    f"{branch}_{name}_factor": factor
    for branch in ("full_attn", "linear_attn", "mlp")
    for name, factor in (("alpha", 2.0), ("beta", 0.5))
}
DEEPSEEK = {
    **{key: LLAMA[key] for key in LLAMA if key != "head_dim"},
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
WAVEFORM = {
    **{key: VIT[key] for key in VIT if key not in ("image_size", "patch_size")},
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def entry(
    model_type: str, options: Mapping[str, Any], stacks: tuple[StackReading, ...], **more: Any
) -> HFModel:
    return HFModel(more.pop("name", model_type), model_type, options, stacks, **more)


def same(
    types: str, options: Mapping[str, Any], stacks: tuple[StackReading, ...], **more: Any
) -> list[HFModel]:
    """Add types whose configs share the family's names and whose readings are the same."""
    return [entry(model_type, options, stacks, **more) for model_type in types.split()]


def made(types: str, stacks: tuple[StackReading, ...], **more: Any) -> list[HFModel]:
    """Types that `benchmarks.hf.small` builds, whose readings are the same."""
    options = more.pop("options", {})
    return [entry(model_type, options, stacks, inputs="made", **more) for model_type in types.split()]
