"""Adding in place: what it saves, and where autograd refuses it.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from normscope.claims.allocations import kept_for_backward, peak_bytes
from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.memory import less
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.nn import Block, ModelConfig, Where
from normscope.nn.residual import Residual

BATCH, TOKENS, WIDTH, DEPTH = 4, 32, 64, 3
SCHEMES = MappingProxyType({"Pre-LN": "pre", "Post-LN": "post", "no norm": "residual-no-norm"})
ROUND_OFF = 1e-5
Add = Callable[[Tensor, Tensor], Tensor]


def _onto_the_stream(x: Tensor, f: Tensor) -> Tensor:
    x += f
    return x


def _onto_the_branch(x: Tensor, f: Tensor) -> Tensor:
    f += x
    return f


ADDS: Mapping[str, Add] = MappingProxyType(
    {"x + f(x)": torch.add, "x += f(x)": _onto_the_stream, "y = f(x); y += x": _onto_the_branch}
)


@claim(
    "C30",
    Source("004", "§7", "建议使用原位加法操作"),
    says="Adding the branch in place, x += f(x), saves memory.",
    asks="real blocks with `x += f(x)` run, give the gradients of `x + f(x)`, and have a lower peak of "
    "memory: Pre-LN, Post-LN and no norm; in training and in inference",
    condition="no gradients are asked for",
    parts={
        "branch": Sentence("The other way round, y = f(x); y += x, lowers the peak."),
        "kept": Sentence("What is kept for the backward pass is less with y = f(x); y += x."),
        "refuses": Sentence("Autograd refuses x += f(x) exactly where f keeps x for its backward pass."),
    },
)
def in_place_add(setup: Setup) -> Evidence:
    """Peaks and gradients of three ways to add, and which branches autograd lets be added in place."""
    cases = [case for seed in setup.seeds for case in (*_block_cases(seed), *_refusals(seed))]
    trained = [case for case in cases if not case.part and not case.met]
    refused = sum(case.where.endswith("refused") for case in trained)
    blocks = _blocks("pre", setup.seeds[0])
    buffers = Ran(blocks, "x + f(x)", training=False).peak / (4 * _input().numel())
    allowed = [case.where.split(":")[0] for case in cases if case.part == "refuses" and case.value == 0]
    return Evidence(
        cases=cases,
        figure=Figure.largest("largest saving of the peak, in %", cases),
        notes=[
            f"In training autograd refuses x += f(x) in {refused} of {len(trained)} runs: what reads x "
            "first, the norm or a matrix, keeps it.",
            f"Branches that may be added in place: {', '.join(dict.fromkeys(allowed))}.",
            f"Without gradients the blocks' peak is {buffers:.3g} tensors of the stream's size, inside the "
            "branches; at the add there are three, or two in place.",
        ],
        of="runs",
    )


def _block_cases(seed: int) -> Iterator[Case]:
    for name, scheme in SCHEMES.items():
        blocks = _blocks(scheme, seed)
        for training in (True, False):
            where = f"{name}, {'training' if training else 'inference'}"
            plain = Ran(blocks, "x + f(x)", training)
            for how, part in (("x += f(x)", ""), ("y = f(x); y += x", "branch")):
                ran = Ran(blocks, how, training)
                saved = 0.0 if ran.refused else less(ran.peak, plain.peak)
                holds = not ran.refused and saved > 0 and ran.differs_from(plain) <= ROUND_OFF
                said = f"{where}{': refused' if ran.refused else ''}"
                yield Case(seed=seed, where=said, value=saved, holds=holds, met=not training, part=part)
            if training:
                kept = less(_kept(blocks, "y = f(x); y += x"), _kept(blocks, "x + f(x)"))
                yield Case(seed=seed, where=where, value=kept, holds=kept > 0, part="kept")


def _blocks(scheme: str, seed: int) -> list[Block]:
    torch.manual_seed(seed)
    config = ModelConfig(scheme=scheme, width=WIDTH, heads=4, depth=DEPTH)
    return [Block(config, Where(index + 1, DEPTH), causal=True) for index in range(DEPTH)]


class Ran:
    """The blocks run once, with one way to add.

    Attributes:
        refused: whether autograd would not have it.
        peak: bytes, beyond what was there.
        result: the output, and in training the gradients of the parameters; empty where refused.
    """

    def __init__(self, blocks: list[Block], how: str, training: bool) -> None:
        self.refused, self.result, x_BTD = False, list[Tensor](), _input()

        def run() -> None:
            with torch.set_grad_enabled(training):
                y_BTD = forward(blocks, x_BTD, ADDS[how])
                self.result = [y_BTD.detach()]
            if training:
                y_BTD.square().mean().backward()

        try:
            self.peak = peak_bytes(run)
        except RuntimeError as error:
            if "in-place" not in str(error) and "inplace" not in str(error):
                raise
            self.refused, self.peak, self.result = True, 0, []
        for block in blocks:
            if not self.refused:
                self.result += [p.grad.clone() for p in block.parameters() if p.grad is not None]
            block.zero_grad()

    def differs_from(self, other: "Ran") -> float:
        """Largest relative difference of the results."""
        return max(
            float((mine - theirs).norm() / theirs.norm().clamp_min(1e-12))
            for mine, theirs in zip(self.result, other.result, strict=True)
        )


def _input() -> Tensor:
    """A stream as an embedding gives it, drawn anew: an add in place would change a shared one."""
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def forward(blocks: list[Block], x_BTD: Tensor, add: Add) -> Tensor:
    """The blocks one after the other, each branch added by `add`. The stream is a buffer of its own."""
    x_BTD = x_BTD.clone()
    for block in blocks:
        for branch, residual in block.sublayers().values():
            x_BTD = _sublayer(x_BTD, branch, residual, add)
    return x_BTD


def _sublayer(x_BTD: Tensor, branch: Callable[[Tensor], Tensor], residual: Residual, add: Add) -> Tensor:
    norms = residual.norms
    return norms["stream"](add(x_BTD, norms["branch_out"](branch(norms["branch_in"](x_BTD)))))


def _kept(blocks: list[Block], how: str) -> int:
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    return sum(kept_for_backward(lambda: forward(blocks, _input(), ADDS[how]), parameters).values())


BRANCHES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "W x": lambda x: x @ torch.eye(WIDTH).requires_grad_(),
        "W x with W frozen": lambda x: x @ torch.eye(WIDTH),
        "LayerNorm": lambda x: F.layer_norm(x, (WIDTH,)),
        "RMSNorm": lambda x: F.rms_norm(x, (WIDTH,)),
        "GELU": F.gelu,
        "ReLU": F.relu,
        "tanh": torch.tanh,
        "softmax": lambda x: x.softmax(-1),
        "dropout": lambda x: F.dropout(x, 0.5),
        "x/2": lambda x: x / 2,
        "x²": torch.square,
    }
)
"""Branches that keep their input and branches that do not."""


def _refusals(seed: int) -> Iterator[Case]:
    """Of each branch: whether it keeps x, and whether x += f(x) goes through; value: 1 if refused."""
    torch.manual_seed(seed)
    for name, branch in BRANCHES.items():
        source = torch.randn(TOKENS, WIDTH, requires_grad=True)
        x = source * 1.0
        keeps = x.untyped_storage().data_ptr() in kept_for_backward(lambda f=branch, x=x: f(x))  # type: ignore[misc]
        refused = not _goes_through(branch, source * 1.0)
        where = f"{name}: keeps x {keeps}, refused {refused}"
        yield Case(seed=seed, where=where, value=float(refused), holds=keeps == refused, part="refuses")


def _goes_through(branch: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    try:
        x += branch(x)
        x.sum().backward()
    except RuntimeError as error:
        if "inplace operation" in str(error):
            return False
        raise
    return True
