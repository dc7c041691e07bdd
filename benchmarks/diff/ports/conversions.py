"""Conversions of the weights of published decoders into those of their ports, as users write them."""

from collections.abc import Callable, Mapping

from torch import Tensor

from benchmarks.diff.ports.blocks import Config

State = dict[str, Tensor]


def from_gpt2(state: State, config: Config) -> State:
    made = {"tok.weight": state["transformer.wte.weight"], "pos.weight": state["transformer.wpe.weight"]}
    made["head.weight"] = state["lm_head.weight"]
    norms = {"transformer.ln_f": "last"}
    for each in range(config.depth):
        old, new = f"transformer.h.{each}", f"layers.{each}"
        norms |= {f"{old}.ln_1": f"{new}.in_1", f"{old}.ln_2": f"{new}.in_2"}
        pairs = {"attn.c_attn": "attn.wqkv", "attn.c_proj": "attn.wo"}
        pairs |= {"mlp.c_fc": "mlp.inner", "mlp.c_proj": "mlp.outer"}
        for theirs, ours in pairs.items():
            made[f"{new}.{ours}.weight"] = state[f"{old}.{theirs}.weight"].T
            made[f"{new}.{ours}.bias"] = state[f"{old}.{theirs}.bias"]
    for theirs, ours in norms.items():
        made[f"{ours}.g"], made[f"{ours}.b"] = state[f"{theirs}.weight"], state[f"{theirs}.bias"]
    return made


def like_llama(norms: Mapping[str, str]) -> Callable[[State, Config], State]:
    """The conversion of LLaMA and its kin, by the names of a layer's norms."""
    names = {"self_attn.q_proj": "attn.wq", "self_attn.k_proj": "attn.wk", "self_attn.v_proj": "attn.wv"}
    names |= {"self_attn.o_proj": "attn.wo", "mlp.gate_proj": "mlp.inner", "mlp.up_proj": "mlp.other"}
    names |= {"mlp.down_proj": "mlp.outer"}

    def convert(state: State, config: Config) -> State:
        made = {"tok.weight": state["model.embed_tokens.weight"], "last.g": state["model.norm.weight"]}
        made["head.weight"] = state["lm_head.weight"]
        for each in range(config.depth):
            old, new = f"model.layers.{each}", f"layers.{each}"
            made |= {
                f"{new}.{ours}.weight": state[f"{old}.{theirs}.weight"] for theirs, ours in names.items()
            }
            made |= {f"{new}.{ours}.g": state[f"{old}.{theirs}.weight"] for theirs, ours in norms.items()}
        return made

    return convert
