"""The loss of K replicas at once: one model's code under `torch.vmap`, on stacked weights.

Shapes: K replicas, then the axes of a single model.
"""

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from normscope.nn.tensors import tensors_of

LossOf = Callable[[nn.Module, Any], Tensor]
State = dict[str, Tensor]


class StackedLoss:
    """Losses (K,) of K replicas that share the code of `skeleton`.

    The graph has plain tensors with K as first axis, so the backward of the losses' sum is an ordinary one.
    Replicas do not interact, so each replica's weights get the gradient of its own loss.

    Args:
        skeleton: the model whose code runs; its own weights are not read.
        loss: scalar of (model, batch).
    """

    def __init__(self, skeleton: nn.Module, loss: LossOf) -> None:
        self._called = _Called(skeleton, loss)
        self._places = _places(self._called)

    def __call__(self, parameters: State, buffers: State, batch: Any) -> Tensor:
        """Compute the losses (K,) and update the buffers (K, …) as the model's forward does."""
        axes = tree_map(lambda part: 0 if isinstance(part, Tensor) else None, batch)  # of K
        stacked = torch.vmap(self.lone, in_dims=(0, 0, axes), randomness="different")
        with _FoldedAttention(), warnings.catch_warnings():
            # An op without a rule for vmap runs once for each replica, as it would alone.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            losses, replaced = stacked(parameters, buffers, batch)
        with torch.no_grad():
            for name, value in replaced.items():
                buffers[name].copy_(value)
        return losses

    def lone(self, parameters: State, buffers: State, batch: Any) -> tuple[Tensor, State]:
        """The loss of one replica, and the buffers that its forward replaced (not changed in place)."""
        tensors = parameters | buffers
        state = {place: tensors[name] for place, name in self._places.items()}
        loss, after = functional_call(self._called, state, (batch,), tie_weights=False)
        return loss, {name: after[name] for name, was in buffers.items() if after[name] is not was}


class _Called(nn.Module):
    """A loss as the forward of a module, for `functional_call`; it also returns the final buffers."""

    def __init__(self, model: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> tuple[Tensor, State]:
        return self._loss(self.model, batch), dict(self.model.named_buffers())


def _places(called: _Called) -> dict[str, str]:
    """Every path that holds a tensor, with the name under which the model lists the tensor.

    `functional_call` can tie weights, but it does not restore the weights of a module that has two paths.
    """
    name_of = {id(tensor): name for name, tensor in tensors_of(called.model).items()}
    places: dict[tuple[int, str], tuple[str, str]] = {}
    every = (called.named_parameters(remove_duplicate=False), called.named_buffers(remove_duplicate=False))
    for path, tensor in itertools.chain(*every):
        owner, _, slot = path.rpartition(".")
        places.setdefault((id(called.get_submodule(owner)), slot), (path, name_of[id(tensor)]))
    return dict(places.values())


def stack_batches(batches: Sequence[Any]) -> Any:
    """Stack K batches of the same form into one, whose tensors have K as first axis.

    Raises:
        ValueError: the batches differ in form, in the shape or dtype of a tensor, or in another value.
    """
    first = batches[0]
    forms = {_form(batch) for batch in batches}
    if len(forms) > 1:
        raise ValueError(f"batches of {' and '.join(sorted(forms))}: replicas need the same")
    if isinstance(first, Tensor):
        return torch.stack(list(batches))
    if isinstance(first, Mapping):
        return {key: stack_batches([batch[key] for batch in batches]) for key in first}
    if isinstance(first, list | tuple):
        return tuple(map(stack_batches, zip(*batches, strict=True)))
    if any(batch != first for batch in batches):
        raise ValueError(f"batches with {first!r} and others: replicas need the same")
    return first


def _form(batch: Any) -> str:
    """Description of a batch's form, which all batches of a stack must share."""
    if isinstance(batch, Tensor):
        return f"the shape {tuple(batch.shape)} in {batch.dtype}"
    if isinstance(batch, Mapping):
        return f"the keys {sorted(map(str, batch))}"
    if isinstance(batch, list | tuple):
        return f"{len(batch)} parts"
    return f"a {type(batch).__name__}"


class _FoldedAttention(TorchFunctionMode):
    """Mode that folds K into the batch for fused attention, which would else run once per replica."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:  # its inner calls do not reach this mode
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    if query.dim() < 3:  # no batch to fold into
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    return _Attend.apply(query, key, value, attn_mask, options)


class _Attend(torch.autograd.Function):
    """Scaled dot-product attention whose rule under vmap is fused attention on (K·B, …)."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: autograd differentiates the call in `vmap`."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, int]:
        num = info.batch_size
        rows = [
            _in_front(t, axis, num).flatten(0, 1)
            for t, axis in zip((query, key, value), in_dims, strict=False)
        ]
        mask = _fold_mask(mask, in_dims[3], num, rows[0])
        out = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], mask, **options)
        return out.unflatten(0, (num, -1)), 0


def _in_front(tensor: Tensor, axis: int | None, num: int) -> Tensor:
    """`tensor` as (K, …), whether or not it has an axis for K."""
    return tensor.expand(num, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


def _fold_mask(mask: Tensor | None, axis: int | None, num: int, query: Tensor) -> Tensor | None:
    """The mask for a query (K·B, …): unchanged if it is the same for all replicas, else with K folded in."""
    if mask is None or (axis is None and mask.dim() < query.dim()):
        return mask
    mask = _in_front(mask, axis, num)
    missing = query.dim() - (mask.dim() - 1)
    mask = mask[(slice(None), *(None,) * missing)]
    batch = query.shape[0] // num
    return mask.expand(num, batch, *mask.shape[2:]).flatten(0, 1)
