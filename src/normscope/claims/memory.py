"""Memory: by the placement of the norm, by recomputation, and by adding in place.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from normscope.claims.allocations import cuda_peak_bytes, kept_for_backward, num_bytes, peak_bytes
from normscope.claims.at_start import blocks_of
from normscope.claims.experiments import calls_of
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, lines_by, plots
from normscope.nn import Block, build
from normscope.nn.models import Model

DEPTHS, BATCH, TOKENS = (2, 8), 2, 64
KINDS = (("layernorm", 64), ("layernorm", 128), ("rmsnorm", 64))
"""Norms and widths."""
LEAST = 5.0
"""Per cent: the lower end of what 003 promises."""


def less(this: float, that: float) -> float:
    """Per cent by which `this` is less than `that`."""
    return 100 * (that - this) / that


def model_of(scheme: str, depth: int, width: int, **options: Any) -> Model:
    """A decoder, always the same: bytes do not depend on what is drawn."""
    torch.manual_seed(0)
    return build("decoder", scheme=scheme, depth=depth, width=width, heads=4, context=TOKENS, **options)


def kept(model: Model, ids: Tensor) -> dict[int, int]:
    """Bytes by storage that the forward pass keeps for the backward pass, without parameters and ids."""
    return kept_for_backward(lambda: model(ids, ids).loss, [*model.parameters(), ids])


@claim("B12")
def memory_of_placements(setup: Setup) -> Evidence:
    """Bytes in both placements: of a step, of what autograd keeps, of the norms' inputs, of inference."""
    sizes = [(*kind, depth) for kind in KINDS for depth in DEPTHS]
    cases = [case for size in sizes for case in _placement_cases(*size)]
    kept_inputs = [case.value for case in cases if case.part == "reason"]
    saved = [case.value for case in cases if case.part == "activations"]
    lines = lines_by((case for case in cases if case.part != "reason"), "depth", "of")
    return Evidence(
        cases,
        Figure.largest("Pre-LN's best saving of peak memory, in %", cases),
        plots=plots("B12", lines),
        notes=[
            f"Pre-LN keeps at least {min(kept_inputs):.3g} % of the inputs of its norms for the backward "
            "pass.",
            f"What is kept for the backward pass changes by {-max(saved):+.2g} to {-min(saved):+.2g} % from "
            "Post-LN to Pre-LN; Pre-LN has one norm more, the final one.",
        ],
        unmeasured=[] if torch.cuda.is_available() else ["CUDA's allocator: no GPU here"],
    )


OF = {"": "peak of a step", "activations": "kept for the backward pass", "inference": "inference"}


def _placement_cases(norm: str, width: int, depth: int) -> Iterator[Case]:
    pre, post = (Bytes(scheme, norm, width, depth) for scheme in ("pre", "post"))
    where = f"{norm}, d = {width}, {depth} blocks"
    for part, value in (
        ("", less(pre.step, post.step)),
        ("activations", less(pre.activations, post.activations)),
        ("inference", less(pre.inference, post.inference)),
    ):
        yield Case(None, where, value, value >= LEAST, part, at={"depth": depth, "of": OF[part]})
    share = 100 * pre.norm_inputs_kept
    yield Case(None, where, share, share < 100, "reason")


class Bytes:
    """Memory that one model takes.

    Attributes:
        step: peak of an AdamW step, all included.
        activations: kept for the backward pass, without parameters and ids.
        inference: peak of a forward pass without gradients, above the weights.
        norm_inputs_kept: share of the norms whose input is kept for the backward pass.
    """

    def __init__(self, scheme: str, norm: str, width: int, depth: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        measure = cuda_peak_bytes if device == "cuda" else peak_bytes
        model = model_of(scheme, depth, width, norm=norm).to(device)
        ids = torch.randint(256, (BATCH, TOKENS), device=device)
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
        with calls_of(norms) as calls:  # these hold the inputs, so that no address comes twice
            storages = kept(model, ids)
        self.activations = sum(storages.values())
        inputs = [x.untyped_storage().data_ptr() for _, x, _ in calls]
        self.norm_inputs_kept = sum(address in storages for address in inputs) / len(inputs)
        self.step = step_peak(model, ids, measure)
        with torch.no_grad():
            self.inference = measure(lambda: model(ids))


def step_peak(model: Model, ids: Tensor, measure: Callable[[Callable[[], object]], int]) -> int:
    """Peak bytes of an AdamW step: what stays between steps, and what the step holds beside it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(ids, ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimiser's state
    model.zero_grad()
    stays = 3 * num_bytes(model.parameters())  # weights and two moments
    return stays + measure(step)


SIZES = ((4, 64), (2, 256))
"""Blocks and widths of C21."""
SAVED, MORE = (40.0, 50.0), (20.0, 40.0)
"""Memory saved and forward operations added, in per cent: 004's range, and "about 30"."""


@claim("C21")
def recomputation(setup: Setup) -> Evidence:
    """Bytes kept and operations, without, with half and with all blocks run again."""
    cases = [case for depth, width in SIZES for case in _again_cases(depth, width)]
    x, f = torch.randn(2, BATCH, TOKENS, 64).unbind()
    by_sum = float(sum(kept_for_backward(lambda: x.requires_grad_() + f.requires_grad_()).values()))
    again = list(cases)
    cases.append(Case(None, "x + f(x), bytes", by_sum, by_sum > 0, "sum"))
    whole = sorted(float(case.at["whole"]) for case in again)
    return Evidence(
        cases,
        Figure.largest("forward operations added where every second block runs again, in %", cases),
        notes=[
            *(f"{case.where}: {case.value:.3g} % more forward operations." for case in again),
            "PyTorch runs a block again only as far as the backward pass needs it. Every second block run "
            f"again to its end adds {whole[0]:.3g} to {whole[-1]:.3g} %.",
        ],
        unmeasured=["time: operations are counted, no clock is read"],
    )


def _again_cases(depth: int, width: int) -> Iterator[Case]:
    ids = torch.randint(256, (BATCH, TOKENS))
    none, half, everything = (_with_checkpoints(depth, width, every) for every in (0, 2, 1))
    forward, usual = flops(lambda: none(ids, ids)), _both_passes(none, ids)
    with set_checkpoint_early_stop(False):
        whole = 100 * (_both_passes(half, ids) - usual) / forward
    for part, said, model in (("", "every second block", half), ("all", "every block", everything)):
        saved = less(sum(kept(model, ids).values()), sum(kept(none, ids).values()))
        more = 100 * (_both_passes(model, ids) - usual) / forward
        holds = SAVED[0] <= saved <= SAVED[1] and MORE[0] <= more <= MORE[1]
        where = f"{depth} blocks, d = {width}, {said} run again, {saved:.3g} % saved"
        yield Case(None, where, more, holds, part, at={"saved": saved, "whole": whole})


def _with_checkpoints(depth: int, width: int, every: int) -> Model:
    """Pre-LN; each `every`-th block is run again in the backward pass, none for 0."""
    model = model_of("pre", depth, width, checkpoint=every == 1)
    for block in blocks_of(model)[every - 1 :: every] if every > 1 else ():
        block.forward = _again(block.forward)  # type: ignore[method-assign]
    return model


def _again(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state, context: checkpoint(plain, state, context, use_reentrant=False)


def flops(run: Callable[[], object]) -> int:
    """Floating-point operations of `run()`, by PyTorch's counter."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _both_passes(model: Model, ids: Tensor) -> int:
    return flops(lambda: model(ids, ids).loss.backward())


Add = Callable[[Tensor, Tensor], Tensor]
SCHEMES = {"Pre-LN": "pre", "Post-LN": "post", "no norm": "residual-no-norm"}
ADDS: Mapping[str, Add] = {
    "x + f(x)": torch.add,
    "x += f(x)": lambda x, f: x.add_(f),
    "y = f(x); y += x": lambda x, f: f.add_(x),
}
ROUND_OFF = 1e-5


@claim("C30")
def in_place_add(setup: Setup) -> Evidence:
    """Peaks and gradients of three ways to add, and which branches autograd lets be added in place."""
    cases = [*_block_cases(), *_refusals()]
    trained = [case for case in cases if not case.part and "training" in case.where]
    refused = sum(case.where.endswith("refused") for case in trained)
    allowed = [str(case.at["branch"]) for case in cases if case.part == "refuses" and case.value == 0]
    return Evidence(
        cases,
        Figure.largest("largest saving of the peak, in %", cases),
        notes=[
            f"In training autograd refuses x += f(x) in {refused} of {len(trained)} runs: the norm or matrix "
            "that reads x first keeps it.",
            f"Branches that may be added in place: {', '.join(allowed)}.",
        ],
    )


def _block_cases() -> Iterator[Case]:
    for name, scheme in SCHEMES.items():
        blocks = blocks_of(model_of(scheme, 3, 64))
        for training in (True, False):
            where = f"{name}, {'training' if training else 'inference'}"
            plain = _ran(blocks, "x + f(x)", training)
            assert plain is not None
            for how, part in (("x += f(x)", ""), ("y = f(x); y += x", "branch")):
                ran = _ran(blocks, how, training)
                saved = less(ran.peak, plain.peak) if ran else 0.0
                holds = ran is not None and saved > 0 and ran.differs_from(plain) <= ROUND_OFF
                yield Case(None, where if ran else f"{where}: refused", saved, holds, part)
            if training:
                ways = (_kept_by(blocks, how) for how in ("y = f(x); y += x", "x + f(x)"))
                share = less(*ways)
                yield Case(None, where, share, share > 0, "kept")


class Ran(NamedTuple):
    """A run: bytes allocated in it; the output, and in training the gradients of the parameters."""

    peak: int
    result: list[Tensor]

    def differs_from(self, other: "Ran") -> float:
        """Largest relative difference of the results."""
        return max(
            float((mine - theirs).norm() / theirs.norm().clamp_min(1e-12))
            for mine, theirs in zip(self.result, other.result, strict=True)
        )


def _ran(blocks: Sequence[Block], how: str, training: bool) -> Ran | None:
    """The blocks run once, with one way to add; None where autograd refuses it."""
    x_BTD, result, peaks = _input(), list[Tensor](), list[int]()
    for block in blocks:
        block.zero_grad()

    def run() -> None:
        with torch.set_grad_enabled(training):
            y_BTD = forward(blocks, x_BTD, ADDS[how])
            result.append(y_BTD.detach())
        if training:
            y_BTD.square().mean().backward()

    if is_refused(lambda: peaks.append(peak_bytes(run))):
        return None
    parameters = (parameter for block in blocks for parameter in block.parameters())
    return Ran(peaks[0], result + [p.grad.clone() for p in parameters if p.grad is not None])


def is_refused(run: Callable[[], object]) -> bool:
    """True where autograd refuses an addition in place that `run()` makes."""
    try:
        run()
    except RuntimeError as error:
        if "in-place" not in str(error) and "inplace" not in str(error):
            raise
        return True
    return False


def _input() -> Tensor:
    """A stream as an embedding gives it, drawn anew: an add in place would change a shared one."""
    return torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))


def forward(blocks: Sequence[Block], x_BTD: Tensor, add: Add) -> Tensor:
    """The blocks one after the other, each branch added by `add`. The stream is a buffer of its own."""
    x_BTD = x_BTD.clone()
    for block in blocks:
        for branch, residual in block.sublayers().values():
            norms = residual.norms
            x_BTD = norms["stream"](add(x_BTD, norms["branch_out"](branch(norms["branch_in"](x_BTD)))))
    return x_BTD


def _kept_by(blocks: Sequence[Block], how: str) -> int:
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    return sum(kept_for_backward(lambda: forward(blocks, _input(), ADDS[how]), parameters).values())


BRANCHES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "W x": lambda x: x @ torch.eye(64).requires_grad_(),
    "W x with W frozen": lambda x: x @ torch.eye(64),
    "LayerNorm": lambda x: F.layer_norm(x, (64,)),
    "RMSNorm": lambda x: F.rms_norm(x, (64,)),
    "GELU": F.gelu,
    "ReLU": F.relu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "dropout": lambda x: F.dropout(x, 0.5),
    "x/2": lambda x: x / 2,
    "x²": torch.square,
}
"""Branches, some of which keep their input."""


def _refusals() -> Iterator[Case]:
    """A case for each branch: does autograd refuse x += f(x) exactly where f keeps x? Value: 1 if refused."""
    torch.manual_seed(0)
    for name, branch in BRANCHES.items():
        source = torch.randn(TOKENS, 64, requires_grad=True)
        x = source * 1.0
        keeps = x.untyped_storage().data_ptr() in kept_for_backward(lambda f=branch, x=x: f(x))  # type: ignore[misc]
        y = source * 1.0
        refused = is_refused(lambda f=branch, y=y: y.add_(f(y)).sum().backward())  # type: ignore[misc]
        where, holds = f"{name}: keeps x {keeps}, refused {refused}", keeps == refused
        yield Case(None, where, float(refused), holds, "refuses", at={"branch": name})
