"""Blocks and models equal those of Hugging Face `transformers` in outputs and gradients."""

from typing import Any

import pytest
import torch
from parity import Part, Table, assert_parity, under
from torch import Tensor
from transformers import (
    BertConfig,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    T5Config,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RotaryEmbedding
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Block

from normscope.nn import Block, Context, Decoder, ModelConfig, Where

D, H, G, HIDDEN, B, T, S, VOCAB = 16, 4, 2, 40, 3, 7, 5, 29
EARLIER_TT = torch.ones(T, T, dtype=torch.bool).tril()
REAL_BT = torch.arange(T) < torch.tensor([7, 4, 1])[:, None]
backends = pytest.mark.parametrize("backend", ["eager", "sdpa"])
precisions = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=["float32", "float64"]
)

GPT2_BLOCK: Table = {
    "attention.q": Part("attn.c_attn.*", third=0, transposed=True),
    "attention.k": Part("attn.c_attn.*", third=1, transposed=True),
    "attention.v": Part("attn.c_attn.*", third=2, transposed=True),
    "attention.o": Part("attn.c_proj.*", transposed=True),
    "attention_residual.norms.branch_in": "ln_1.*",
    "feed_forward.up": Part("mlp.c_fc.*", transposed=True),
    "feed_forward.down": Part("mlp.c_proj.*", transposed=True),
    "feed_forward_residual.norms.branch_in": "ln_2.*",
}
BERT_BLOCK: Table = {
    "attention.q": "attention.self.query.*",
    "attention.k": "attention.self.key.*",
    "attention.v": "attention.self.value.*",
    "attention.o": "attention.output.dense.*",
    "attention_residual.norms.stream": "attention.output.LayerNorm.*",
    "feed_forward.up": "intermediate.dense.*",
    "feed_forward.down": "output.dense.*",
    "feed_forward_residual.norms.stream": "output.LayerNorm.*",
}
LLAMA_BRANCHES: Table = {
    "attention.q": "self_attn.q_proj.*",
    "attention.k": "self_attn.k_proj.*",
    "attention.v": "self_attn.v_proj.*",
    "attention.o": "self_attn.o_proj.*",
    "feed_forward.gate": "mlp.gate_proj.*",
    "feed_forward.up": "mlp.up_proj.*",
    "feed_forward.down": "mlp.down_proj.*",
}
LLAMA_BLOCK: Table = LLAMA_BRANCHES | {
    "attention_residual.norms.branch_in": "input_layernorm.*",
    "feed_forward_residual.norms.branch_in": "post_attention_layernorm.*",
}
OLMO2_BLOCK: Table = LLAMA_BRANCHES | {
    "attention.q_norm": "self_attn.q_norm.*",
    "attention.k_norm": "self_attn.k_norm.*",
    "attention_residual.norms.branch_out": "post_attention_layernorm.*",
    "feed_forward_residual.norms.branch_out": "post_feedforward_layernorm.*",
}
GEMMA2_BLOCK: Table = LLAMA_BRANCHES | {
    "attention_residual.norms.branch_in": "input_layernorm.*",
    "attention_residual.norms.branch_out": "post_attention_layernorm.*",
    "feed_forward_residual.norms.branch_in": "pre_feedforward_layernorm.*",
    "feed_forward_residual.norms.branch_out": "post_feedforward_layernorm.*",
}
T5_SELF: Table = {
    "attention.q": "layer.0.SelfAttention.q.*",
    "attention.k": "layer.0.SelfAttention.k.*",
    "attention.v": "layer.0.SelfAttention.v.*",
    "attention.o": "layer.0.SelfAttention.o.*",
    "attention_residual.norms.branch_in": "layer.0.layer_norm.*",
}
T5_CROSS: Table = {
    "cross.q": "layer.1.EncDecAttention.q.*",
    "cross.k": "layer.1.EncDecAttention.k.*",
    "cross.v": "layer.1.EncDecAttention.v.*",
    "cross.o": "layer.1.EncDecAttention.o.*",
    "cross_residual.norms.branch_in": "layer.1.layer_norm.*",
}


def _t5_feed_forward(layer: int) -> Table:
    return {
        "feed_forward.up": f"layer.{layer}.DenseReluDense.wi.*",
        "feed_forward.down": f"layer.{layer}.DenseReluDense.wo.*",
        "feed_forward_residual.norms.branch_in": f"layer.{layer}.layer_norm.*",
    }


def _block(*, causal: bool, cross: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> Block:
    config = ModelConfig(**{"width": D, "heads": H, "hidden": HIDDEN} | options)
    return Block(config, Where(1, depth=12), causal=causal, cross=cross).to(dtype)


def _added(visible: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask that their eager attention adds to the logits."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


@backends
@precisions
def test_gpt2_block(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    config = GPT2Config(n_embd=D, n_head=H, n_inner=HIDDEN, attn_implementation=backend)
    theirs = GPT2Block(config, layer_idx=0).to(dtype).eval()
    ours = _block(scheme="gpt2", activation="gelu-tanh", causal=True, dtype=dtype)
    mask = _added(EARLIER_TT[None, None], dtype) if backend == "eager" else None
    assert_parity(
        ours,
        theirs,
        GPT2_BLOCK,
        ours,
        lambda x: theirs(x, attention_mask=mask),
        [torch.randn(B, T, D, dtype=dtype)],
        tolerance,
    )


@backends
@precisions
@pytest.mark.parametrize("padded", [False, True])
def test_bert_block(backend: str, padded: bool, dtype: torch.dtype, tolerance: float) -> None:
    config = BertConfig(
        hidden_size=D, num_attention_heads=H, intermediate_size=HIDDEN, attn_implementation=backend
    )
    theirs = BertLayer(config).to(dtype).eval()
    ours = _block(scheme="post", eps=1e-12, causal=False, dtype=dtype)
    visible_B11S = REAL_BT[:, None, None, :] if padded else None
    mask = None if visible_B11S is None else _added(visible_B11S.expand(B, 1, T, T), dtype)
    assert_parity(
        ours,
        theirs,
        BERT_BLOCK,
        lambda x: ours(x, Context(mask=visible_B11S)),
        lambda x: theirs(x, mask),
        [torch.randn(B, T, D, dtype=dtype)],
        tolerance,
    )


_WIDTHS = {
    "hidden_size": D,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "intermediate_size": HIDDEN,
    "rms_norm_eps": 1e-6,
}
_ROTARY = {"kv_heads": G, "positions": "rotary", "bias": False, "eps": 1e-6}


@backends
def test_llama_block(backend: str) -> None:
    """Grouped keys, rotary positions, RMSNorm, SwiGLU."""
    config = LlamaConfig(**_WIDTHS, attn_implementation=backend)
    theirs = LlamaDecoderLayer(config, layer_idx=0).eval()
    ours = _block(scheme="pre", norm="rmsnorm", activation="swiglu", causal=True, **_ROTARY)
    _assert_rotary_parity(ours, theirs, LLAMA_BLOCK, LlamaRotaryEmbedding(config))


@backends
def test_olmo2_block(backend: str) -> None:
    """Norms after the branches, QK-norm over the whole width."""
    config = Olmo2Config(**_WIDTHS, attn_implementation=backend)
    theirs = Olmo2DecoderLayer(config, layer_idx=0).eval()
    ours = _block(scheme="olmo2", activation="swiglu", causal=True, **_ROTARY)
    _assert_rotary_parity(ours, theirs, OLMO2_BLOCK, Olmo2RotaryEmbedding(config))


@pytest.mark.parametrize(("backend", "softcap"), [("eager", 2.0), ("eager", None), ("sdpa", None)])
def test_gemma2_block(backend: str, softcap: float | None) -> None:
    """Norms on both sides with 1 + γ, GeGLU, capped logits (which their SDPA leaves out), a scale of its own.

    The sliding window of this layer is wider than the sequence.
    """
    config = Gemma2Config(
        **_WIDTHS,
        head_dim=6,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=softcap,
        attn_implementation=backend,
    )
    theirs = Gemma2DecoderLayer(config, layer_idx=0).eval()
    ours = _block(
        scheme="peri",
        norm="rmsnorm-plus-one",
        activation="geglu-tanh",
        head_width=6,
        attention_scale=5**-0.5,
        softcap=softcap,
        causal=True,
        **_ROTARY,
    )
    _assert_rotary_parity(ours, theirs, GEMMA2_BLOCK, Gemma2RotaryEmbedding(config))


def _assert_rotary_parity(ours: Block, theirs: Any, table: Table, rotary: Any) -> None:
    """Each layer has its own rotary angles."""
    x_BTD = torch.randn(B, T, D)
    turn = rotary(x_BTD, torch.arange(T)[None])
    mask = _added(EARLIER_TT[None, None])
    assert_parity(
        ours,
        theirs,
        table,
        ours,
        lambda x: theirs(x, attention_mask=mask, position_embeddings=turn),
        [3 * x_BTD],
    )


@backends
def test_t5_encoder_block(backend: str) -> None:
    """Relative positions as a float mask that learns; logits without a scale; no bias anywhere."""
    theirs = T5Block(_t5_config(backend, is_decoder=False)).eval()
    ours = _t5_block(causal=False)
    assert_parity(
        ours,
        theirs,
        T5_SELF | _t5_feed_forward(1),
        lambda x, bias: ours(x, Context(mask=bias)),
        lambda x, bias: theirs(x, position_bias=bias)[0],
        [torch.randn(B, T, D), torch.randn(1, H, T, T)],
    )


@backends
def test_t5_decoder_block(backend: str) -> None:
    theirs = T5Block(_t5_config(backend, is_decoder=True), layer_idx=0).eval()
    ours = _t5_block(causal=True, cross=True)
    mask = _added(EARLIER_TT[None, None])
    assert_parity(
        ours,
        theirs,
        T5_SELF | T5_CROSS | _t5_feed_forward(2),
        lambda x, bias, memory: ours(x, Context(mask=bias, memory=memory)),
        lambda x, bias, memory: theirs(
            x, attention_mask=mask, position_bias=bias, encoder_hidden_states=memory
        )[0],
        [torch.randn(B, T, D), torch.randn(1, H, T, T), torch.randn(B, S, D)],
    )


def _t5_config(backend: str, *, is_decoder: bool) -> T5Config:
    return T5Config(
        d_model=D, num_heads=H, d_kv=6, d_ff=HIDDEN, is_decoder=is_decoder, attn_implementation=backend
    )


def _t5_block(*, causal: bool, cross: bool = False) -> Block:
    return _block(
        scheme="pre",
        norm="rmsnorm",
        eps=1e-6,
        activation="relu",
        head_width=6,
        attention_scale=1.0,
        bias=False,
        causal=causal,
        cross=cross,
    )


@backends
@precisions
def test_gpt2_model(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    """Logits and gradients of a padded batch, embeddings shared with the head."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=D,
        n_head=H,
        n_inner=HIDDEN,
        n_layer=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=backend,
    )
    theirs = GPT2LMHeadModel(config).to(dtype).eval()
    ours = _decoder(2, activation="gelu-tanh", context=32, tie=True).to(dtype)
    table = {
        "embedding.tokens": "transformer.wte.*",
        "embedding.positions": "transformer.wpe.*",
        "final_norm": "transformer.ln_f.*",
    }
    table |= under("blocks.0", "transformer.h.0", GPT2_BLOCK) | under(
        "blocks.1", "transformer.h.1", GPT2_BLOCK
    )
    _assert_model_parity(ours, theirs, table, tolerance)


@backends
def test_llama_model(backend: str) -> None:
    config = LlamaConfig(**_WIDTHS, vocab_size=VOCAB, num_hidden_layers=2, attn_implementation=backend)
    theirs = LlamaForCausalLM(config).eval()
    ours = _decoder(2, norm="rmsnorm", activation="swiglu", **_ROTARY)
    table = {"embedding.tokens": "model.embed_tokens.*", "final_norm": "model.norm.*", "head": "lm_head.*"}
    table |= under("blocks.0", "model.layers.0", LLAMA_BLOCK) | under(
        "blocks.1", "model.layers.1", LLAMA_BLOCK
    )
    _assert_model_parity(ours, theirs, table, 1e-5)


def _decoder(depth: int, **options: Any) -> Decoder:
    return Decoder(
        ModelConfig(scheme="pre", depth=depth, width=D, heads=H, hidden=HIDDEN, vocab=VOCAB, **options)
    )


def _assert_model_parity(ours: Decoder, theirs: Any, table: Table, tolerance: float) -> None:
    """Logits of the real tokens, and the next-token loss."""
    ids, real = torch.randint(VOCAB, (B, T)), REAL_BT.long()
    assert_parity(
        ours,
        theirs,
        table,
        lambda: ours(ids, attention_mask=real).logits[REAL_BT],
        lambda: theirs(input_ids=ids, attention_mask=real).logits[REAL_BT],
        tolerance=tolerance,
    )
    loss, expected = ours(ids[:, :-1], labels=ids[:, 1:]).loss, theirs(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, expected.to(loss.dtype), rtol=1e-6, atol=0)
