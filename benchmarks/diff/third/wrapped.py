"""Further styles of GPT-2 and LLaMA: wrappers, hooks, checkpoints, scripts, dead parameters, subclasses."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style
from benchmarks.diff.third.gpt import H, NanoBlock, NanoGPT, W, to_min
from benchmarks.diff.third.gpt_functions import Fairseq, to_fairseq
from benchmarks.diff.third.llama import Lit, LitMLP, to_lit


class Step(NamedTuple):
    """Logits and their cross-entropy."""

    loss: Tensor
    logits: Tensor


@dataclass
class Output:
    """Output of a wrapped model."""

    logits: Tensor
    hidden_states: Tensor | None = None


class Lightning(nn.Module):
    """Training module that holds a model as `net` and gives a loss and logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Tensor) -> Step:
        logits = self.net(batch)
        logits = logits[0] if isinstance(logits, tuple) else logits
        return Step(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()), logits)


class Named(nn.Module):
    """Wrapper whose forward gives a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.module(input_ids)}


class Classed(nn.Module):
    """Wrapper whose forward gives a dataclass, and whose core is two modules deep."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.core = nn.ModuleDict({"lm": model})

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        return Output(self.core["lm"](input_ids))


class Checkpointed(NanoGPT):
    """NanoGPT whose blocks are checkpointed."""

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(idx.shape[1])
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = checkpoint(block, x, use_reentrant=False)
        return self.lm_head(self.transformer["ln_f"](x))


def _normed(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (module.ln(args[0]),)  # type: ignore[operator]


class HookedBlock(nn.Module):
    """Block whose norms are applied by hooks before the branches."""

    def __init__(self, block: NanoBlock) -> None:
        super().__init__()
        self.attn, self.mlp = block.attn, block.mlp
        self.attn.ln, self.mlp.ln = block.ln_1, block.ln_2
        for branch in (self.attn, self.mlp):
            branch.register_forward_pre_hook(_normed)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x) + x
        return self.mlp(x) + x


class Hooked(NanoGPT):
    """NanoGPT whose blocks work by hooks."""

    def __init__(self, slip: str = "") -> None:
        super().__init__(slip)
        layers = self.transformer["h"]
        self.transformer["h"] = nn.ModuleList(HookedBlock(block) for block in layers)  # type: ignore[attr-defined]


def to_hooked(state: State) -> State:
    """Norms below the branches."""
    moved = to_min(state)
    return {k.replace(".ln_1.", ".attn.ln.").replace(".ln_2.", ".mlp.ln."): v for k, v in moved.items()}


class Watched(NanoGPT):
    """NanoGPT with forward hooks that keep the blocks' outputs."""

    def __init__(self, slip: str = "") -> None:
        super().__init__(slip)
        self.seen: dict[str, Tensor] = {}
        for name, module in self.named_modules():
            if isinstance(module, NanoBlock):
                module.register_forward_hook(self._keep(name))

    def _keep(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def kept(module: nn.Module, args: Any, output: Tensor) -> None:
            self.seen[name] = output.detach()

        return kept


class Dead(NanoGPT):
    """NanoGPT with parameters that nothing reads."""

    def __init__(self, slip: str = "") -> None:
        super().__init__(slip)
        self.value_head = nn.Linear(W, 1)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            block.register_parameter("gate", nn.Parameter(torch.zeros(W)))


class Scripted(nn.Module):
    """SwiGLU with its activation as a scripted function."""

    def __init__(self, known: LitMLP) -> None:
        super().__init__()
        self.fc_1, self.fc_2, self.proj = known.fc_1, known.fc_2, known.proj

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(gated()(self.fc_1(x), self.fc_2(x)))


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


@cache
def gated() -> Callable[[Tensor, Tensor], Tensor]:
    """The scripted activation; scripting warns, so that it waits for the first model that needs it."""
    return torch.jit.script(_gated)


class LitScripted(Lit):
    """lit-gpt's LLaMA with a scripted activation."""

    def __init__(self, slip: str = "") -> None:
        super().__init__(slip)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            block.mlp = Scripted(block.mlp)


def folded(slip: str = "") -> Fairseq:
    """A decoder of fairseq that does not scale its queries, for weights that are scaled."""
    return Fairseq("no scale")


def to_folded(state: State) -> State:
    """Queries with the scale of attention in their weights."""
    return {k: v * (W // H) ** -0.5 if "q_proj" in k else v for k, v in to_fairseq(state).items()}


class OwnGPT2(GPT2LMHeadModel):
    """Subclass of the library's model that returns logits alone."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.alibi = None

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        hidden = self.transformer(input_ids, use_cache=False, **kwargs).last_hidden_state
        return torch.einsum("btc,vc->btv", hidden, self.transformer.wte.weight)


class OwnLlama(LlamaForCausalLM):
    """Subclass that normalises by its own function and computes a loss from the ids."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = nn.SiLU()

    def forward(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        x = self.model.embed_tokens(input_ids)
        where = torch.arange(x.shape[1])[None]
        tables = self.model.rotary_emb(x, position_ids=where)
        for layer in self.model.layers:
            x = layer(x, attention_mask=None, position_embeddings=tables)
        logits = self.lm_head(self.model.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return loss, logits


def variants(nano: Style, lit: Style, fairseq: Style) -> dict[str, Style]:
    """Styles that differ from those given in how they are run."""
    hooked = replace(
        nano,
        make=Hooked,
        convert=to_hooked,
        attention=("transformer.h.{}.attn",),
        mlp=("transformer.h.{}.mlp",),
    )
    return {
        "checkpointed nanoGPT": replace(nano, make=Checkpointed),
        "nanoGPT by hooks": hooked,
        "watched nanoGPT": replace(nano, make=Watched),
        "nanoGPT with dead parameters": replace(nano, make=Dead),
        "scripted lit-gpt": replace(lit, make=LitScripted, convert=to_lit),
        "folded fairseq": replace(fairseq, make=folded, convert=to_folded),
        "nanoGPT in a training module": nano.inside("net", Lightning),
        "nanoGPT in a dict": nano.inside("module", Named),
        "lit-gpt in a dataclass": lit.inside("core.lm", Classed),
    }
