"""Saving and restoring of a trial's state, as named tensors and plain values.

Parameter groups are not saved, because learning rates, ε and decay follow from the config and the step.
Tensors that are sharded over processes (FSDP2) are gathered when saved and sharded again when restored, so
every process must call these functions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normscope.errors import UsageError
from normscope.nn.tensors import tensors_of
from normscope.train.trial import Trial

_MOST_NAMES = 3


@dataclass(frozen=True)
class State:
    """Tensors by name, on the CPU, and values for JSON."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def take_state(trial: Trial, model: nn.Module, *, is_kept: bool = True) -> State:
    """Weights, buffers, optimisers, loss scale, step and losses of `trial`, whose bare model is `model`.

    Args:
        is_kept: False in a process that only helps to gather; its result has empty tensors.
    """
    tensors = {f"model.{name}": whole(tensor, is_kept) for name, tensor in tensors_of(model).items()}
    optimizer: dict[str, Any] = {}
    for name, parameter, state in _optimizer_slots(trial.optimizers):
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = whole(value, is_kept)
            else:
                optimizer.setdefault(name, {})[key] = value
    tensors["losses"] = torch.tensor(trial.losses, dtype=torch.float64)
    tensors["gradient_norms"] = torch.tensor(trial.gradient_norms, dtype=torch.float64)
    scaler = None if trial.scaler is None else trial.scaler.state_dict()
    return State(tensors, {"step": trial.step, "optimizer": optimizer, "scaler": scaler})


@torch.no_grad()
def put_state(trial: Trial, model: nn.Module, state: State) -> None:
    """Restore `trial` to the state of `take_state`.

    Raises:
        UsageError: the state belongs to another model.
    """
    own = tensors_of(model)
    weights = {k.removeprefix("model."): v for k, v in state.tensors.items() if k.startswith("model.")}
    here, there = ({name: t.shape for name, t in each.items()} for each in (own, weights))
    misfits = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if misfits:
        names = ", ".join(misfits[:_MOST_NAMES]) + (", …" if len(misfits) > _MOST_NAMES else "")
        raise UsageError(f"a checkpoint of another model ({names})", "the same model", "start a new run")
    for name, tensor in own.items():
        tensor.copy_(_as(weights[name], tensor))
    slots = {name: (parameter, states) for name, parameter, states in _optimizer_slots(trial.optimizers)}
    for path, tensor in state.tensors.items():
        if path.startswith("optimizer."):
            name, _, key = path.removeprefix("optimizer.").rpartition(".")
            parameter, states = slots[name]
            is_counter = key == "step"  # stays on the CPU in torch's optimisers
            states[parameter][key] = tensor.clone() if is_counter else _like(parameter, tensor)
    for name, values in state.values["optimizer"].items():
        parameter, states = slots[name]
        states[parameter].update(values)
    if trial.scaler is not None:
        trial.scaler.load_state_dict(state.values["scaler"])
    trial.step = state.values["step"]
    trial.losses[:] = state.tensors["losses"].tolist()
    trial.gradient_norms[:] = state.tensors["gradient_norms"].tolist()


def _optimizer_slots(optimizers: list[Optimizer]) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Yield a name for each parameter of each optimiser, the parameter, and the optimiser's states."""
    for number, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            yield f"{number}.{index}", parameter, optimizer.state


def whole(tensor: Tensor, is_kept: bool = True) -> Tensor:
    """A copy of `tensor` on the CPU, gathered if it is sharded; an empty tensor unless `is_kept`."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True).contiguous() if is_kept else torch.empty(0)


def _as(value: Tensor, tensor: Tensor) -> Tensor:
    """`value` on the device of `tensor`, and sharded like it."""
    value = value.to(tensor.device)
    if not hasattr(tensor, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(tensor, DTensor)
    return distribute_tensor(value, tensor.device_mesh, tensor.placements)


def _like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """An optimiser's tensor on its parameter's device, with the layout that the optimiser would use."""
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(_as(value, parameter))
