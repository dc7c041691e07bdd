"""Run: a training run of the user's own, as live objects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass(kw_only=True)
class Run:
    """A training run as its script builds it; a factory may return it, and `normscope.check` takes it.

    Nothing of it is changed: trials step copies of the model and of the optimizers, with their state.

    Attributes:
        model: the module that trains.
        batches: a batch, or an iterable of them, as for `normscope.check`.
        loss: `loss(output, batch)` → scalar; None if the model computes its own.
        optimizer: one or more optimizers that hold the parameters of `model`: PyTorch's, or any that follow
            their protocol. A step is one step of each, in this order.
        scheduler: the schedulers of the optimizers' learning rates, stepped after each step; leave out one
            that your loop steps after each epoch.
        clip: largest norm of all gradients together; None does not clip.
        precision: "float32" keeps the model's own type; "bfloat16" and "float16" run under autocast, the
            latter with loss scaling.
        accumulation: batches per step; the step is on their mean loss.
    """

    model: nn.Module
    batches: Any
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Optimizer | Sequence[Optimizer] = field(default=())
    scheduler: LRScheduler | Sequence[LRScheduler] = field(default=())
    clip: float | None = None
    precision: str = "float32"
    accumulation: int = 1

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The optimizers, in the order in which they step."""
        return _several(self.optimizer)

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers, in the order in which they step."""
        return _several(self.scheduler)

    def states_follow(self) -> None:
        """Move the optimizers' states to the device and the dtype of their parameters, which were moved."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Optimizer) and optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())


def _several(given: Any) -> tuple[Any, ...]:
    """The objects given: one that can step, or a sequence of them."""
    return (given,) if hasattr(given, "step") else tuple(given or ())
