"""The function part on modules: given weights, gradients, randomness, and what cannot be compared."""

import copy
from typing import Any

import pytest
import reimplemented
import torch
from torch import Tensor, nn

import normscope
from normscope.compare import Diff
from normscope.compare.reasons import search
from normscope.compare.types import Difference, Part

IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


def compared(a: Any, b: Any, **options: Any) -> Diff:
    """The function part alone, on 2 sequences of 16 tokens."""
    options.setdefault("batch", IDS if isinstance(a, nn.Module) else None)
    return normscope.diff(a, b, parts="function", batch_size=2, seq_len=16, reraise=True, **options)


def pair() -> tuple[reimplemented.NanoGPT, reimplemented.NanoGPT]:
    """A nanoGPT and a copy of it."""
    model = reimplemented.NanoGPT()
    return model, copy.deepcopy(model)


def only(found: Diff) -> Difference:
    """The one difference of the function part."""
    (difference,) = found.of(Part.FUNCTION)
    return difference


def test_equal_weights_are_compared_as_they_stand() -> None:
    found = compared(*pair())
    assert found.differences == ()
    assert found.parts[0].said == "exactly the same function as they stand"


def test_other_fresh_weights_are_no_difference() -> None:
    found = compared(reimplemented.NanoGPT(), reimplemented.NanoGPT())
    assert found.differences == ()
    assert found.parts[0].said == "exactly the same function"


def _scaled(model: Any) -> None:
    model.h[1].mlp[2].weight.data *= 2


def _shifted(model: Any) -> None:
    model.h[1].ln_2.weight.data += 1


def _transposed(model: Any) -> None:
    weight = model.h[1].attn.c_proj.weight.data
    weight.copy_(weight.T.clone())


def _rounded(model: Any) -> None:
    for parameter in model.h[1].mlp.parameters():
        parameter.data = parameter.data.bfloat16().float()


def _exchanged(model: Any) -> None:
    weight = model.h[1].attn.c_attn.weight.data
    weight.copy_(torch.cat([weight[32:64], weight[:32], weight[64:]]))


def _interleaved(model: Any) -> None:
    weight = model.h[1].attn.c_attn.weight.data
    order = torch.arange(8).reshape(2, 4).T.flatten()
    weight[:32] = weight[:32].unflatten(0, (4, 8))[:, order].flatten(0, 1)


CHANGES = {
    "weights-scaled": _scaled,
    "weights-shifted": _shifted,
    "weights-transposed": _transposed,
    "weights-rounded": _rounded,
    "weights-order": _exchanged,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_weight_that_a_conversion_changed_is_named(name: str) -> None:
    a, b = pair()
    CHANGES[name](b)
    difference = only(compared(a, b))
    assert difference.name == name
    assert difference.is_first
    assert {site.rpartition(".")[0] for _, site in difference.sites if site} == {"h.1"}


def test_rows_that_were_interleaved_for_rotary_positions_are_described() -> None:
    a, b = pair()
    _interleaved(b)
    difference = only(compared(a, b))
    assert (difference.name, difference.b) == ("weights-order", "the halves of each head interleaved")


class Detached(reimplemented.NanoBlock):
    """Its attention gives no gradient to the stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x.detach()))
        return x + self.mlp(self.ln_2(x))


def test_a_branch_that_is_cut_from_the_gradient_is_found_although_all_values_agree() -> None:
    a, b = pair()
    b.h[1].__class__ = Detached
    difference = only(compared(a, b))
    assert difference.name == "gradient-cut"
    assert difference.sites == (("h.1.attn", "h.1.attn"),)


class Dropping(reimplemented.NanoGPT):
    """Drops between the blocks, also in eval mode."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = nn.functional.dropout(block(x), 0.1, training=True)
        return self.lm_head(self.ln_f(x))


def test_dropout_that_is_left_on_is_named() -> None:
    difference = compared(reimplemented.NanoGPT(), Dropping()).of(Part.FUNCTION)[0]
    assert (difference.name, difference.a, difference.b) == ("dropout-left-on", "deterministic", "random")


def test_the_search_for_a_random_step_is_made_once() -> None:
    a, b = pair()
    b.__class__ = Dropping
    b.ln_f.eps = 1e-2
    forwards = compared(a, b).parts[0].figures["forwards"]
    given, walked, other_seed = 2, 2, 1
    assert forwards["b"] <= 2 + given + walked + other_seed + 3


def test_two_random_models_are_compared_with_the_same_random_numbers() -> None:
    found = compared(Dropping(), Dropping())
    assert found.differences == ()
    assert any("the same random numbers" in note for note in found.notes)


REFUSED = {
    "widths": ("nn:decoder,depth=2,width=32,heads=4", "nn:decoder,depth=2,width=64,heads=4", "32 × 32 in A"),
    "inputs": ("nn:decoder,depth=2,width=32,heads=4", "nn:vision,depth=2,width=32,heads=4", "reads ids"),
    "stacks": (
        "nn:encoder-decoder,depth=2,width=32,heads=4",
        "nn:decoder,depth=2,width=32,heads=4",
        "encoder and decoder in A, decoder in B",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_compared_say_why(name: str) -> None:
    a, b, words = REFUSED[name]
    (part,) = compared(a, b).parts
    assert part.how == "not"
    assert words in part.why[0]


class _Bent(nn.Linear):
    """A projection that is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        return y + 0.1 * (30 * y).sin()


@pytest.mark.parametrize(("depths", "words"), [((3, 2), "B lacks blocks.2."), ((2, 3), "A lacks blocks.2.")])
def test_blocks_that_one_side_lacks_are_named_where_the_hidden_states_part(
    depths: tuple[int, int], words: str
) -> None:
    a, b = (f"nn:decoder,scheme=post,depth={depth},width=16,heads=2" for depth in depths)
    said = only(compared(a, b)).message
    assert said.startswith(
        f"The two part at the last hidden state. {words} No further reason was found. Tried"
    )


def test_a_tensor_of_A_in_the_place_of_Bs_confirms_no_reason() -> None:
    a, b = pair()
    b.h[1].mlp[0].__class__ = _Bent
    found = compared(a, b)
    assert found.differences
    assert [each.confirmed for each in found.differences] == [None] * len(found.differences)


def test_reasons_that_could_not_be_tried_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scene: Any) -> Any:
        raise RuntimeError("shapes that it does not know")

    monkeypatch.setattr(search, "FILES", dict.fromkeys(search.FILES, (broken,)))
    a, b = pair()
    b.h[1].mlp[0].__class__ = _Bent
    first = compared(a, b).differences[0]
    assert first.name == "function"
    assert any("could not be tried here: RuntimeError: shapes that it" in line for line in first.evidence)


def test_values_that_are_not_finite_in_both_are_not_called_the_same() -> None:
    model = normscope.nn.build("decoder", scheme="pre", depth=2, width=16, heads=2)
    with torch.no_grad():
        model.blocks[1].feed_forward.up.weight[0, 0] = float("nan")
    found = normscope.diff(model, copy.deepcopy(model), parts="function")
    assert [part.how for part in found.parts] == ["not"]
    assert "not finite, from blocks.1.feed_forward on" in found.parts[0].why[0]


def test_a_padded_vocabulary_is_compared_as_far_as_both_have_it() -> None:
    wide, plain = (f"nn:decoder,depth=2,width=32,heads=4,vocab={n}" for n in (300, 256))
    (part,) = compared(wide, plain).parts
    assert part.how == "partly"
    assert part.said.startswith(("exactly the same function", "the same function to"))
    assert part.figures["largest"] < 1e-14
    assert "first 256 outputs" in part.why[0]


def test_a_map_takes_the_place_of_what_is_found() -> None:
    a, b = reimplemented.NanoGPT(), reimplemented.NanoGPT()
    given = {"h.0.mlp.0.weight": "h.1.mlp.0.weight"}
    found = compared(a, b, map=given)
    assert found.weights is not None
    assert found.weights["made_from"]["h.0.mlp.0.weight"] == {
        "from": ["h.1.mlp.0.weight"],
        "how": "by the given map",
    }
    assert found.of(Part.FUNCTION)[0].sites[0] == ("h.0.mlp", "h.0.mlp")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"h.0.nothing": "h.1.mlp.0.weight"}, "a parameter of B"),
        ({"wpe.weight": "h.1.ln_1.bias"}, "one shape"),
    ],
)
def test_a_map_that_does_not_fit_is_an_error(given: dict[str, str], words: str) -> None:
    with pytest.raises(normscope.UsageError, match=words):
        compared(reimplemented.NanoGPT(), reimplemented.NanoGPT(), map=given)


def test_the_models_are_left_as_they_were() -> None:
    a, b = pair()
    before = {name: value.clone() for name, value in b.state_dict().items()}
    b.train()
    compared(a, b)
    assert b.training
    assert all(torch.equal(value, before[name]) for name, value in b.state_dict().items())
    assert {value.dtype for value in b.parameters()} == {torch.float32}


class LateBias(reimplemented.NanoBlock):
    """`x + y @ w + b`: Python adds the bias to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        length, attn = x.shape[1], self.attn
        q, k, v = map(reimplemented.heads, attn.c_attn(self.ln_1(x)).chunk(3, -1))
        seen = attn.bias[:, :, :length, :length] != 0
        y = reimplemented.merged(nn.functional.scaled_dot_product_attention(q, k, v, seen))
        x = x + y @ attn.c_proj.weight.T + attn.c_proj.bias
        return x + self.mlp[1](self.mlp[0](self.ln_2(x))) @ self.mlp[2].weight.T + self.mlp[2].bias


@pytest.mark.parametrize("order", [1, -1])
def test_a_bias_that_is_added_to_the_sum_is_no_difference(order: int) -> None:
    a, b = reimplemented.NanoGPT(), reimplemented.NanoGPT()
    for block in b.h:
        block.__class__ = LateBias
    assert compared(*(a, b)[::order]).differences == ()
    b.h[0].ln_2.eps = b.h[1].ln_1.eps = 1e-2
    difference = only(compared(*(a, b)[::order]))
    assert (difference.name, len(difference.sites), difference.confirmed) == ("norm-eps", 2, True)


def test_a_difference_at_the_end_of_the_encoder_is_none_of_the_decoder() -> None:
    a, b = reimplemented.T5(), reimplemented.T5()
    b.encoder_norm.eps = 1e-2
    ids = torch.randint(1, 256, (2, 16)), torch.randint(1, 256, (2, 12))
    found = normscope.diff(a, b, batch=ids, parts="function", reraise=True)
    assert [each.name for each in found.differences] == ["final-norm-eps"]


def test_a_norm_in_another_place_is_no_changed_weight() -> None:
    a = normscope.nn.build("decoder", scheme="peri", depth=2, width=32, heads=4)
    b = normscope.nn.build("decoder", scheme="pre", depth=2, width=32, heads=4)
    with torch.no_grad():
        for parameter in a.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    b.load_state_dict(a.state_dict(), strict=False)
    norms = "blocks.1.attention_residual.norms"
    b.get_parameter(f"{norms}.branch_in.weight").data.copy_(a.get_parameter(f"{norms}.branch_out.weight"))
    assert not any(each.name.startswith("weights") for each in compared(a, b).differences)


@pytest.mark.parametrize("turn", [1, 2])
def test_parts_of_a_fused_weight_that_changed_places_are_named(turn: int) -> None:
    a, b = pair()
    with torch.no_grad():
        for name, weight in b.named_parameters():
            if name.endswith("c_attn.weight"):
                weight.copy_(weight.roll(turn * weight.shape[0] // 3, 0))
    first = compared(a, b).differences[0]
    assert first.name == "weights-order"
    theirs = {1: "v", 2: "k"}[turn]
    assert f'has the values of A\'s "{theirs}"' in first.message
