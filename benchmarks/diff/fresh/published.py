"""A published decoder: how it is built, where its modules are, and its weights as a `Canon`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.diff.families import Places
from benchmarks.diff.fresh.attention import Canon, Opt

NONE = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
LLAMA = {f"{r}": f"self_attn.{r}_proj" for r in "qkvo"}
LLAMA |= {r: f"mlp.{r}_proj" for r in ("gate", "up", "down")}
LLAMA |= {"n1": "input_layernorm", "n2": "post_attention_layernorm"}
LLAMA |= {"qn": "self_attn.q_norm", "kn": "self_attn.k_norm"}
ENDS = {"emb": "model.embed_tokens", "final": "model.norm", "head": "lm_head"}


@dataclass(frozen=True)
class Published:
    """A published decoder of one size.

    Attributes:
        kind: type of transformers.
        config: its configuration.
        opt: options under which our decoders are the same function.
        prefix: path of a layer.
        roles: role → module in a layer; "heads", "concat" and "gate_up" are fused.
        ends: role → module outside of the layers.
        attention, mlp: modules of a branch, norms included; "" is the layer.
    """

    kind: str
    config: Mapping[str, Any]
    opt: Opt
    prefix: str = "model.layers.{}"
    roles: Mapping[str, str] = None  # type: ignore[assignment]
    ends: Mapping[str, str] = None  # type: ignore[assignment]
    attention: Places = ("self_attn", "input_layernorm")
    mlp: Places = ("mlp", "post_attention_layernorm")

    def make(self, **changes: Any) -> nn.Module:
        """The model with fresh weights."""
        config = AutoConfig.for_model(self.kind, **{**NONE, **self.config, **changes})
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model

    def given(self, seed: int, **changes: Any) -> nn.Module:
        """The model with weights of a file; changes of its configuration leave the weights as they are."""
        return loaded(self.make(**changes), weights_of(self.make, seed))

    def state(self, seed: int) -> Canon:
        """The weights of the file by their names there, matrices (out, in)."""
        return weights_of(self.make, seed)

    def canon(self, seed: int) -> Canon:
        """The weights of the file."""
        state = self.state(seed)
        made: Canon = {}
        for role, path in (self.ends or ENDS).items():
            made |= _taken(state, path, role)
        for i in range(self.opt.depth):
            for role, path in (self.roles or LLAMA).items():
                full = f"{self.prefix.format(i)}.{path}"
                for key, value in _taken(state, full, role).items():
                    made |= {f"{i}.{k}": v for k, v in _split(key, value, self.opt).items()}
        return made

    def places(self, where: str) -> Places:
        """Modules of "attention 0", "mlp 1", "first" or "last"."""
        ends = self.ends or ENDS
        if where in ("first", "last"):
            names = ("emb", "pos", "emb_norm") if where == "first" else ("final", "head")
            return tuple(ends[name] for name in names if name in ends)
        branch, _, layer = where.partition(" ")
        head = self.prefix.format(layer)
        return tuple(f"{head}.{each}".rstrip(".") for each in getattr(self, branch))


def _taken(state: Canon, path: str, role: str) -> Canon:
    """Weight and bias of a module under the name of its role."""
    is_norm = role in ("n1", "n2", "qn", "kn", "final", "emb_norm")
    names = {"weight": f"{role}.w" if is_norm else role, "bias": f"{role}.b"}
    return {ours: state[f"{path}.{leaf}"] for leaf, ours in names.items() if f"{path}.{leaf}" in state}


def _split(key: str, value: Tensor, opt: Opt) -> Canon:
    """The parts of a fused tensor."""
    role, _, end = key.partition(".")
    end = f".{end}" if end else ""
    if role == "heads" and opt.kv == opt.heads:
        parts = value.unflatten(0, (opt.heads, 3, opt.size)).unbind(1)
        return {f"{r}{end}": part.flatten(0, 1) for r, part in zip("qkv", parts, strict=True)}
    if role in ("heads", "concat"):
        rows = (opt.heads * opt.size, opt.kv * opt.size, opt.kv * opt.size)
        return {f"{r}{end}": part for r, part in zip("qkv", value.split(rows), strict=True)}
    if role == "gate_up":
        return dict(zip((f"gate{end}", f"up{end}"), value.chunk(2), strict=True))
    return {key: value}


def loaded(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load what fits."""
    known = model.state_dict()
    fitting = {k: v.clone() for k, v in state.items() if k in known and known[k].shape == v.shape}
    model.load_state_dict(fitting, strict=False)
    return model


_KNOWN: dict[tuple[Any, int], Canon] = {}


def forget() -> None:
    """Forget the weights that were drawn."""
    _KNOWN.clear()


def weights_of(make: Callable[..., nn.Module], seed: int) -> Canon:
    """Weights of a file, with which no option is without effect; drawn once."""
    key = (make, seed)
    if key not in _KNOWN:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            _KNOWN[key] = {k: v.clone() for k, v in lively(make(), seed).state_dict().items()}
    return _KNOWN[key]


def lively(model: nn.Module, seed: int) -> nn.Module:
    """Matrices of unit gain, and gains and biases that are not as at the start."""
    noise = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:  # tables of sines
                continue
            drawn = torch.randn(parameter.shape, generator=noise, dtype=torch.float32)
            if parameter.dim() > 1:
                wide = id(parameter) in embeddings
                parameter.copy_(drawn * (0.5 if wide else parameter[0].numel() ** -0.5))
            else:
                parameter.add_(0.2 * drawn.to(parameter.dtype))
    return model
