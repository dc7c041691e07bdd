"""Multi-head attention: causal, bidirectional or cross; grouped keys; rotary positions; soft-capped logits.

Shapes: B batch, T queries, S keys, D width, H heads, G groups of keys and values, K width of a head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.context import NOTHING, Context
from normscope.nn.embedding import rotate, rotation
from normscope.nn.linear import LINEARS
from normscope.nn.norms import NoNorm, UnitNorm
from normscope.nn.qk_norm import logit_scale
from normscope.nn.scheme import Inside


class Attention(nn.Module):
    """softmax(q kᵀ·scale) v for each head, then `o`; with a soft cap c the logits are c·tanh(logits/c).

    Args:
        width: D.
        heads: H.
        kv_heads: G, each shared by H/G heads (Ainslie et al. 2023, arXiv:2305.13245); H by default.
        head_width: K; width/heads by default.
        causal: whether a token sees only itself and earlier ones.
        cross: whether keys and values come from `context.memory`.
        rope_base: base of the rotary positions of q and k, None for none.
        softcap: c, None for none (Gemma 2).
        scale: factor on the logits; by default 1/√K, or the default of the QK-norm.
        dropout: dropout rate of the attention weights, in train mode.
        inside: changes by the scheme.
        keeps_largest: whether `largest_logit`, (H,), keeps the largest logit of each head in train mode, for
            `clip_queries_and_keys`.
        first: whether this is the attention whose values a value residual carries on.
        make_norm: maker of the norms in `inside`, called with their width.

    Raises:
        UsageError: heads do not divide the width, or heads with rotary positions have an odd width.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        cross: bool = False,
        kv_heads: int | None = None,
        head_width: int | None = None,
        rope_base: float | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        inside: Inside | None = None,
        first: bool = True,
        keeps_largest: bool = False,
        make_norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        _require_divides(width, heads, kv_heads, head_width)
        inside = inside or Inside()
        self.heads, self.head_width = heads, head_width or width // heads
        if rope_base is not None and self.head_width % 2:
            raise UsageError(
                f"rotary positions with heads {self.head_width} wide",
                "heads of an even width",
                "change the number of heads",
            )
        self.causal, self.cross, self.rope_base = causal, cross, rope_base
        self.softcap, self.dropout = softcap, dropout
        make = LINEARS[inside.linear]
        q_width, kv_width = heads * self.head_width, kv_heads * self.head_width
        self.q = make(width, q_width, bias=bias)
        self.k = make(width, kv_width, bias=bias)
        self.v = make(width, kv_width, bias=bias)
        self.o = make(q_width, width, bias=bias)
        self.qk_norm = inside.qk_norm
        self.q_norm, self.k_norm = (self._qk_norm(x, make_norm) for x in (q_width, kv_width))
        self.logit_scale = logit_scale(inside.qk_norm, heads, kv_heads, self.head_width, width)
        self.scale: float = self.logit_scale.default if scale is None else scale  # type: ignore[assignment]
        self.largest_logit: Tensor | None
        self.register_buffer("largest_logit", torch.zeros(heads) if keeps_largest else None, persistent=False)
        self.v_norm = make_norm(self.head_width) if inside.v_norm else NoNorm()
        mixing = None if cross else inside.value_residual
        self.gives_values, self.takes_values = mixing is not None and first, mixing is not None and not first
        learnt = self.takes_values and mixing == "learnt"
        self.value_mix = nn.Parameter(torch.full((1,), 0.5)) if learnt else None
        gates = {"head": heads, "element": q_width}.get(inside.attention_gate or "")
        self.output_gate = make(width, gates, bias=bias) if gates is not None else None
        self.head_gain = nn.Parameter(torch.ones(heads, 1, 1)) if inside.head_gain else None
        self.inner_norm = make_norm(q_width) if inside.before_o and not cross else NoNorm()

    def forward(self, x_BTD: Tensor, context: Context = NOTHING) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        q_BHTK = self._heads(self.q, x_BTD, self.q_norm)
        if self.cross:
            k_BGSK, v_BGSK = self._memory(context)
            mask = context.memory_mask
        else:
            k_BGSK, v_BGSK = self._heads(self.k, x_BTD, self.k_norm), self._heads(self.v, x_BTD, self.v_norm)
            v_BGSK = self._with_first(v_BGSK, context)
            if self.rope_base is not None:
                turn = context.rotation or self._rotation(x_BTD, context)
                q_BHTK, k_BGSK = rotate(q_BHTK, turn), rotate(k_BGSK, turn)
            k_BGSK, v_BGSK = self._remember(k_BGSK, v_BGSK, context)
            mask = context.mask
        q_BHTK, k_BGSK = self.logit_scale(q_BHTK, k_BGSK)
        if self.largest_logit is not None and self.training:
            self._keep_largest(self.largest_logit, q_BHTK, k_BGSK, mask)
        y_BHTK = attend(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            mask=mask,
            causal=self.causal,
            scale=self.scale,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
        )
        if self.head_gain is not None:
            y_BHTK = self.head_gain * y_BHTK
        if self.output_gate is not None:
            gate_BTHX = self.output_gate(x_BTD).unflatten(-1, (self.heads, -1))
            y_BHTK = torch.sigmoid(gate_BTHX).transpose(1, 2) * y_BHTK
        return self.o(self.inner_norm(y_BHTK.transpose(1, 2).flatten(2)))

    def _with_first(self, v_BGTK: Tensor, context: Context) -> Tensor:
        """The values, with those of the stack's first attention mixed in for a value residual."""
        if context.first is None:  # a block by itself
            return v_BGTK
        if self.gives_values:
            context.first.values = v_BGTK
        if not self.takes_values or context.first.values is None:
            return v_BGTK
        share = 0.5 if self.value_mix is None else self.value_mix
        return (1 - share) * v_BGTK + share * context.first.values

    @torch.no_grad()
    def _keep_largest(self, largest_H: Tensor, q_BHTK: Tensor, k_BGSK: Tensor, mask: Tensor | None) -> None:
        num_queries, num_keys = q_BHTK.shape[-2], k_BGSK.shape[-2]
        visible = None if mask is None else _broadcast(mask, q_BHTK, num_keys)
        if self.causal:
            visible = _with_causality(visible, num_queries, num_keys, q_BHTK.device)
        found_H = largest_logits(q_BHTK, k_BGSK, visible, self.scale)
        largest_H.copy_(torch.maximum(largest_H, found_H.to(largest_H.dtype)))

    def _qk_norm(self, full_width: int, make_norm: Callable[[int], nn.Module]) -> nn.Module:
        if self.qk_norm is None:
            return NoNorm()
        if self.qk_norm in ("cosine", "unit"):
            return UnitNorm()
        return make_norm(full_width if self.qk_norm == "full" else self.head_width)

    def _heads(self, project: nn.Module, x_BTD: Tensor, norm: nn.Module) -> Tensor:
        """Project, norm over all heads or over each, split: (B, H or G, T, K)."""
        y_BTX = project(x_BTD)
        if self.qk_norm == "full":
            y_BTX = norm(y_BTX)
        y_BTHK = y_BTX.unflatten(-1, (-1, self.head_width))
        return (y_BTHK if self.qk_norm == "full" else norm(y_BTHK)).transpose(1, 2)

    def _rotation(self, x_BTD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin for the tokens after those in the cache."""
        seen = context.cache[self][0].shape[2] if context.cache and self in context.cache else 0
        position_1T = torch.arange(seen, seen + x_BTD.shape[1], device=x_BTD.device)[None]
        return rotation(position_1T, self.head_width, self.rope_base or 0.0, x_BTD.dtype)

    def _remember(self, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """All keys and values so far, with the earlier ones from the cache."""
        if context.cache is None:
            return k, v
        if self in context.cache:
            earlier_k, earlier_v = context.cache[self]
            k, v = torch.cat([earlier_k, k], dim=2), torch.cat([earlier_v, v], dim=2)
        context.cache[self] = (k, v)
        return k, v

    def _memory(self, context: Context) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory; a cache holds them from the first token on."""
        if context.memory is None:
            raise UsageError("cross-attention without memory", "context.memory (B, S, D)", "set the memory")
        if context.cache is not None and self in context.cache:
            return context.cache[self]
        memory = context.memory
        k, v = self._heads(self.k, memory, self.k_norm), self._heads(self.v, memory, self.v_norm)
        if context.cache is not None:
            context.cache[self] = (k, v)
        return k, v


@torch.no_grad()
def largest_logits(q_BHTK: Tensor, k_BGSK: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """(H,), the largest visible logit of each head in the batch; 0 if all are below.

    Args:
        visible: a mask that broadcasts to (B, H, T, S): bool, or float with −inf where nothing is seen.
    """
    repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
    logits_BHTS = (q_BHTK * scale) @ k_BGSK.repeat_interleave(repeats, dim=1).mT
    if visible is not None:
        hidden = ~visible if visible.dtype == torch.bool else visible == float("-inf")
        logits_BHTS = logits_BHTS.masked_fill(hidden, 0.0)
    return logits_BHTS.amax(dim=(0, 2, 3)).clamp(min=0.0)


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The attention's output (B, H, T, K). A query with no visible key gives zeros, with zero gradients."""
    num_queries, num_keys = q_BHTK.shape[-2], k_BGSK.shape[-2]
    mask = None if mask is None else _broadcast(mask, q_BHTK, num_keys)
    # One new token after a cache sees everything; SDPA's own flag would align it with the first key.
    if causal and (mask is not None or softcap is not None or 1 < num_queries < num_keys):
        mask = _with_causality(mask, num_queries, num_keys, q_BHTK.device)
    if softcap is not None:
        return _attend_capped(q_BHTK, k_BGSK, v_BGSK, mask, scale, softcap, dropout)
    return F.scaled_dot_product_attention(
        q_BHTK,
        k_BGSK,
        v_BGSK,
        attn_mask=mask,
        is_causal=causal and mask is None and num_queries == num_keys,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=q_BHTK.shape[1] != k_BGSK.shape[1],
    )


def _attend_capped(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> Tensor:
    """`attend` with a soft cap, step by step, because no fused kernel caps logits."""
    repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = (t.repeat_interleave(repeats, dim=1) for t in (k_BGSK, v_BGSK))
    # q is scaled before the product, or float16 may overflow.
    logits_BHTS = softcap * torch.tanh((q_BHTK * (scale / softcap)) @ k_BHSK.mT)
    if mask is None:
        return F.dropout(logits_BHTS.softmax(-1), dropout) @ v_BHSK
    if mask.dtype != torch.bool:
        added, mask = mask, mask > float("-inf")
        logits_BHTS = logits_BHTS + added.masked_fill(~mask, 0.0)
    # A row without visible keys would give 0/0: let it see everything, then set its output to 0.
    some_BHT1 = mask.any(dim=-1, keepdim=True)
    logits_BHTS = logits_BHTS.masked_fill(~mask & some_BHT1, float("-inf"))
    weights_BHTS = logits_BHTS.softmax(-1).masked_fill(~some_BHT1, 0.0)
    return F.dropout(weights_BHTS, dropout) @ v_BHSK


def _with_causality(mask: Tensor | None, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """`mask` without later keys; the queries are the last T of the keys."""
    earlier = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    if mask is None:
        return earlier
    return mask & earlier if mask.dtype == torch.bool else mask.masked_fill(~earlier, float("-inf"))


def _broadcast(mask: Tensor, q_BHTK: Tensor, num_keys: int) -> Tensor:
    """Check `mask` and give it four axes; (B, T, S) applies to all heads."""
    batch, heads, num_queries, _ = q_BHTK.shape
    wide = mask[:, None] if mask.dim() == 3 else mask
    full = (batch, heads, num_queries, num_keys)
    fits = wide.dim() in (2, 4) and all(
        have in (1, want) for have, want in zip(wide.shape, full[-wide.dim() :], strict=True)
    )
    if not fits:
        raise UsageError(
            f"an attention mask of shape {tuple(mask.shape)}",
            f"(T, S), (B, T, S) or (B, H, T, S) with B={batch}, H={heads}, T={num_queries}, S={num_keys}",
            "reshape it",
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UsageError(
            f"an attention mask of {mask.dtype}", "bool (True: visible) or float (added)", "use mask.bool()"
        )
    return wide if mask.dtype == torch.bool else wide.to(q_BHTK.dtype)


def _require_divides(width: int, heads: int, kv_heads: int, head_width: int | None) -> None:
    if heads < 1 or (head_width is None and width % heads):
        raise UsageError(
            f"heads={heads} for width={width}", "heads that divide the width", "change one of the two"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(
            f"kv_heads={kv_heads} for heads={heads}",
            "kv_heads that divide the heads",
            "change one of the two",
        )
