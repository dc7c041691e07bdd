"""Patches: each kind changes one forward and its gradients, and leaves the model as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import BASES, batch, tiny
from torch import Tensor, nn

from normscope.anatomy import Site, capture, measuring, read_anatomy
from normscope.compare.layout import Layout
from normscope.compare.patched_ops import Formula
from normscope.compare.patches import patched, tensors_at
from normscope.compare.types import Patch
from normscope.subjects import Subject, make_subject


class Small(nn.Module):
    """(B, 4) → (B, 4) with an ε, a number in a function, and a dropout that is always on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_epsilon = 1e-2
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (4,), eps=self.layer_norm_epsilon)
        return F.dropout(self.lin(x) / 3.0, 0.5, True)


@pytest.fixture
def small() -> Small:
    return Small().double()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(3)).double()


def run(model: nn.Module, *patches: Patch) -> Tensor:
    torch.manual_seed(0)
    with patched(model, patches) as applied:
        output: Tensor = model(X)
    assert applied.done == set(range(len(patches)))
    return output.detach()


def state(model: nn.Module) -> dict[str, Any]:
    pointers = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return {
        "pointers": pointers,
        "hooks": hooks,
        "own": {k: v for k, v in vars(model).items() if k[0] != "_"},
    }


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = all(
        p == q and torch.equal(v, w)
        for (p, v), (q, w) in zip(*(s["pointers"].values() for s in (a, b)), strict=True)
    )
    return same and a["hooks"] == b["hooks"] and a["own"] == b["own"]


PATCHES = [
    Patch("attribute", "layer_norm_epsilon", 0.5),
    Patch("number", "", (1e-2, 0.5)),
    Patch("number", "", (3.0, 1.5)),
    Patch("parameter", "lin.weight", torch.eye(4)),
    Patch("output", "lin", 2.0),
    Patch("output", "lin", ("add", {"what": 1.0})),
    Patch("function", "", ("dropout", {"training": False})),
]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.kind} {patch.path}")
def test_a_patch_changes_one_forward_and_is_undone(small: Small, patch: Patch) -> None:
    before, plain = state(small), run(small)
    assert not torch.equal(run(small, patch), plain)
    assert same_state(state(small), before)
    assert torch.equal(run(small), plain)


def test_what_each_kind_does(small: Small) -> None:
    plain = run(small)
    for patch in (Patch("number", "", (3.0, 1.5)), Patch("output", "lin", 2.0)):
        assert torch.allclose(run(small, patch), 2 * plain)
    eps = run(small, Patch("attribute", "layer_norm_epsilon", 0.5))
    assert torch.equal(run(small, Patch("number", "", (1e-2, 0.5))), eps)
    normed = F.layer_norm(X, (4,), eps=1e-2)
    free = run(small, Patch("function", "", ("dropout", {"training": False})))
    assert torch.allclose(free, small.lin(normed) / 3)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_patch_is_undone_after_an_error(small: Small, error: type[BaseException]) -> None:
    before = state(small)
    with pytest.raises(error), patched(small, PATCHES):
        raise error
    assert same_state(state(small), before)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (Patch("attribute", "nothing.eps", 1.0), 'no module "nothing"'),
        (Patch("parameter", "lin.gain", torch.ones(4)), 'no parameter "lin.gain"'),
        (Patch("miracle", "", 1.0), 'called "miracle"'),
    ],
)
def test_a_patch_of_nothing_is_refused(small: Small, patch: Patch, message: str) -> None:
    before = state(small)
    with pytest.raises(ValueError, match=message), patched(small, [PATCHES[0], patch]):
        pass
    assert same_state(state(small), before)


def test_a_patch_without_effect_is_not_done(small: Small) -> None:
    with patched(small, [Patch("number", "", (77.0, 1.0))]) as applied:
        small(X)
    assert applied.done == set()


# Patches at sites


def opened(base: str) -> tuple[Subject, list[tuple[str, Site]]]:
    subject = make_subject(tiny(BASES[base]).double(), batch(BASES[base]))
    branch, other = read_anatomy(subject).branches[:2]
    attention = branch.attention[0]
    sites = {
        "entry": branch.entry,
        "norm": branch.norms[0].output,
        "projection": branch.projections[0].output,
        "query": attention.query,
        "logits": attention.logits,
        "value": attention.value,
        "output": branch.output,
        "sum": branch.sum,
        "up": other.projections[0].output,
    }
    return subject, list(sites.items())


def captured(subject: Subject, sites: list[Site], patches: list[Patch]) -> tuple[dict[Site, Tensor], Tensor]:
    with patched(subject.model, patches) as applied, measuring(subject.model):
        output, found = capture(subject.model, subject.forward, sites)
        assert applied.done == set(range(len(patches)))
        return {**found, **applied.replaced}, output.sin().sum()


@pytest.mark.parametrize("base", BASES)
def test_a_formula_at_a_site_has_its_values_and_its_gradient(base: str) -> None:
    subject, sites = opened(base)
    every = [site for _, site in sites]
    plain, loss = captured(subject, every, [])
    weight = subject.model.embed.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)).to(weight)
    for name, site in sites:
        formula = "rescale_logits" if name == "logits" else "scale"
        patch = Patch("site", "", Formula(site, formula, options={"by": 1.5}))
        found, changed = captured(subject, every, [patch])
        seen = plain[site] > -1e4
        assert torch.allclose(found[site][seen], 1.5 * plain[site][seen], rtol=1e-12), name
        if (base, name) != ("bert", "sum"):  # a norm follows, which takes the factor away
            assert float((changed - loss).detach().abs()) > 1e-9, name
        (gradient,) = torch.autograd.grad(changed, weight)
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight.add_(step * direction)
                ends.append(float(captured(subject, every, [patch])[1].detach()))
                weight.sub_(step * direction)
        slope = (ends[0] - ends[1]) / 2e-6
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-6), name
    _, same = captured(subject, every, [])
    assert torch.equal(same, loss)


def test_a_formula_of_other_sites_has_their_gradient() -> None:
    subject, _ = opened("llama")
    branch = read_anatomy(subject).branches[0]
    norm, attention = branch.norms[0], branch.attention[0]
    sites = [norm.output, attention.logits]
    plain, loss = captured(subject, sites, [])
    options = {"kind": "rmsnorm", "eps": norm.eps}
    weight = {"weight": norm.weight or ""}
    normed = Formula(norm.output, "norm", (norm.input,), options, weight)
    # Inside of the fused attention no function returns the logits.
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    ones = {"by": 8**-0.5, "visible": visible}
    turned = Layout((8, 8, 12), (8, 8, 12), (0, 2, 1), (8, 12, 8))
    sources = (attention.query, attention.key)
    logits = Formula(attention.logits, "attend", sources, ones, layouts=(None, None, turned))
    parameters = [subject.model.embed.weight, subject.model.blocks[0].norm1.weight]
    parameters.append(subject.model.blocks[0].attn.q_proj.weight)
    for formula in (normed, logits):
        found, changed = captured(subject, sites, [Patch("site", "", formula)])
        seen = plain[formula.site] > -1e4
        assert torch.allclose(found[formula.site][seen], plain[formula.site][seen], rtol=1e-10)
        for parameter in parameters:
            one, two = (torch.autograd.grad(x, parameter, retain_graph=True)[0] for x in (loss, changed))
            # Hooks of a parameter are gone with the patch: its own part of the formula is not there then.
            if not (formula is normed and parameter is parameters[1]):
                assert torch.allclose(one, two, rtol=1e-9, atol=1e-12)


def test_a_formula_reaches_the_parameters_that_it_reads() -> None:
    subject, _ = opened("gpt")
    norm = read_anatomy(subject).branches[0].norms[0]
    options = {"kind": "layernorm", "eps": norm.eps}
    name = norm.weight or ""
    formula = Formula(
        norm.output, "norm", (norm.input,), options, {"weight": name, "bias": name.replace("weight", "bias")}
    )
    parameter = subject.model.blocks[0].norm1.weight
    gradients = []
    for patches in ([], [Patch("site", "", formula)]):
        with patched(subject.model, patches), measuring(subject.model):
            loss = capture(subject.model, subject.forward, [])[0].sin().sum()
            gradients.append(torch.autograd.grad(loss, parameter)[0])
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)


def test_formulas_at_one_site_follow_one_another() -> None:
    subject, sites = opened("gpt")
    site = dict(sites)["norm"]
    plain, _ = captured(subject, [site], [])
    first = Patch("site", "", Formula(site, "add", options={"what": 1.0}))
    second = Patch("site", "", Formula(site, "scale", options={"by": 2.0}))
    found, _ = captured(subject, [site], [first, second])
    assert torch.allclose(found[site], 2 * (plain[site] + 1))


def test_a_put_tensor_keeps_what_was_made_there() -> None:
    subject, sites = opened("bert")
    site = dict(sites)["sum"]
    plain, _ = captured(subject, [site], [])
    put = torch.ones_like(plain[site])
    with patched(subject.model, tensors_at({site: put})) as applied, measuring(subject.model):
        _, found = capture(subject.model, subject.forward, [site])
    assert torch.equal(found[site], put)
    assert torch.equal(applied.before[site], plain[site])


@pytest.mark.parametrize(
    ("view", "op", "nth"),
    [
        (lambda y: y.permute(1, 0, 2), "permute.default", 0),
        (lambda y: y.transpose(0, 2), "transpose.int", 0),
        (lambda y: y.permute(2, 0, 1), "permute.default", 0),
        (lambda y: y.view(6, 4), "view.default", 0),
        (lambda y: y.transpose(0, 1).transpose(1, 2), "transpose.int", 1),
    ],
)
def test_a_tensor_whose_view_is_put_keeps_what_its_maker_gave_it(
    view: Callable[[Tensor], Tensor], op: str, nth: int
) -> None:
    """The final norm behind time-first blocks reads a transposed view of their last sum, which stays."""

    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return view(x + 1.0).clone()

    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(7))
    made, kept = Site("", 0, "aten.add.Tensor", 0), view(x + 1.0)
    model, site = Viewed(), Site("", 0, f"aten.{op}", nth)
    with patched(model, tensors_at({site: torch.zeros_like(kept)})) as applied:
        _, found = capture(model, lambda: model(x), [made, site])
    assert not found[made].any()
    assert torch.equal(applied.made(made, found[made]), x + 1.0)
    assert torch.equal(applied.made(site, found[site]), kept)


def test_a_parameter_and_an_input_are_never_overwritten() -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(6.0).reshape(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, 2) + self.table[:2].view(2, 2)

    model, x = Sliced(), torch.ones(2, 2)
    site = Site("", 0, "aten.view.default", 0)
    table = Site("", 0, "aten.slice.Tensor", 0)
    patches = [Patch("site", "", Formula(each, "scale", options={"by": 9.0})) for each in (site, table)]
    with patched(model, patches) as applied:
        model(x)
    assert applied.done == set()
    assert torch.equal(x, torch.ones(2, 2))
    assert torch.equal(model.table, torch.arange(6.0).reshape(3, 2))


def test_layouts_and_rows_are_the_forms_that_a_formula_knows() -> None:
    layout = Layout((6, 4), (2, 3, 4), (1, 0, 2), (3, 2, 4))
    rows = torch.tensor([2, 0])
    y = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    what = torch.arange(3.0)[:, None, None].expand(3, 2, 2)
    formula = Formula(Site("", 0, "", 0), "add", options={"what": what}, layouts=(layout,), rows=(rows,))
    value = formula.value(y, [], formula.options).reshape(2, 3, 4)
    expected = y.reshape(2, 3, 4).clone()
    for token in range(3):
        expected[:, token, [0, 2]] += token
    assert torch.allclose(value, expected)


def test_a_tensor_in_common_form_is_put_in_the_models_own() -> None:
    layout = Layout((6, 4), (2, 3, 4), (1, 2, 0), (3, 4, 2))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(6))
    (patch,) = tensors_at({Site("", 0, "", 0): layout.apply(x)}, layout)
    assert torch.equal(patch.value[1], x)


def test_a_formula_with_another_number_has_the_gradient_of_a_model_with_it() -> None:
    gradients = []
    for is_patched in (True, False):
        subject, _ = opened("llama")
        norm = read_anatomy(subject).branches[0].norms[0]
        options = {"kind": "rmsnorm", "eps": 0.5}
        formula = Formula(norm.output, "norm", (norm.input,), options, {"weight": norm.weight or ""})
        if not is_patched:
            subject.model.blocks[0].norm1.variance_epsilon = 0.5
        with patched(subject.model, [Patch("site", "", formula)] if is_patched else []):
            loss = subject.forward().sin().sum()
            gradients.append(torch.autograd.grad(loss, subject.model.embed.weight)[0])
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)
