"""`fuse`: replace the residual adds of a model, and the norms behind them, by one operation each."""

from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import nn

from normscope.anatomy import read_anatomy
from normscope.anatomy.names import named_modules
from normscope.errors import UsageError
from normscope.fusing.checking import Situation, checked
from normscope.fusing.finding import Left, find_pairs
from normscope.fusing.pairs import Pair
from normscope.fusing.running import Place, Running
from normscope.kernels.ahead import ReadsAhead
from normscope.kernels.dispatch import Backend
from normscope.nn.recompute import Recomputed
from normscope.subjects import make_subject, require_module
from normscope.subjects.subject import Batch

_NO_SUM = "norms that read a reshaped or cast sum are not fused; see `normscope anatomy` for what they read"


class Fused(AbstractContextManager["Fused"]):
    """A fused model's pairs, and the way back: `undo()`, or leaving a `with` block.

    Attributes:
        model: the model, changed in place.
        pairs: the adds and norms that are computed together.
        left: the norms behind residual adds that stay as they are, and why.
    """

    def __init__(
        self, model: nn.Module, pairs: tuple[Pair, ...], left: tuple[Left, ...], running: Running
    ) -> None:
        self.model, self.pairs, self.left, self._running = model, pairs, left, running

    def undo(self) -> nn.Module:
        """Take the fusing back; the model, with the weights that it has by now."""
        self._running.remove()
        self._running = Running({}, {}, {}, None)
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        """One line, and one more for each norm that is left."""
        lines = [f"<Fused: {len(self.pairs)} residual adds with their norms>"]
        return "\n".join([*lines, *(f"left {each.norm}: {each.why}" for each in self.left)])


@torch.inference_mode(mode=False)  # gradients are checked
def fuse(model: nn.Module, batch: Batch | None = None, *, backend: Backend | None = None) -> Fused:
    """Compute each residual add of a model together with the norm that reads it (`kernels.residual_norm`).

    The anatomy finds the pairs. Each is checked on the spot: on the values of one forward, the normed stream,
    the stream and their gradients must be those of the model's own modules up to rounding. A norm that fails
    the check, or is written out in a larger module, is left as it is (`Fused.left`).

    The model is changed in place: its weights, their names and its state dict stay. A copy of a fused model
    is fused too. Code under `torch.compile` is not fused, because the compiler does that itself.

    Args:
        model: any module.
        batch: one batch of the model, as for `read_anatomy`; None for one that is made.
        backend: as for `residual_norm`.

    Raises:
        UsageError: the model is no module, is fused already, or recomputes activations, or has no pair.
    """
    require_module(model)
    modules = dict(named_modules(model))
    if any(isinstance(module, ReadsAhead) for module in modules.values()):
        raise UsageError(
            "a model that is fused", "one that is not", "call undo() of the object that fuse returned"
        )
    if any(
        isinstance(m, Recomputed) or getattr(m, "gradient_checkpointing", False) for m in modules.values()
    ):
        do = "switch gradient checkpointing off before you fuse"
        raise UsageError("a model with gradient checkpointing", "one that keeps its activations", do)
    batch = make_subject(model).batch if batch is None else batch
    seen, left = find_pairs(model, batch, read_anatomy(model, batch))
    pairs: list[Pair] = []
    dtypes: dict[tuple[Place, Situation], torch.dtype | None] = {}
    for each in seen:
        pair, norm = each.pair, modules[each.pair.norm]
        found = checked(pair, norm, each.add, backend)
        if isinstance(found, str):
            left.append(Left(pair.norm, found))
            continue
        pairs.append(pair)
        dtypes |= {((pair.holder, pair.nth), where): dtype for where, dtype in found.items()}
    if not pairs:
        reasons = "; ".join(f"{each.norm}: {each.why}" for each in left[:3])
        given = "a model without a LayerNorm or RMSNorm that reads a residual add and can be fused"
        raise UsageError(given, "at least one", reasons or _NO_SUM)
    places = {(pair.holder, pair.nth): pair for pair in pairs}
    norms = {place: modules[pair.norm] for place, pair in places.items()}
    running = Running(places, norms, dtypes, backend)
    running.install(model)
    return Fused(model, tuple(pairs), tuple(left), running)
