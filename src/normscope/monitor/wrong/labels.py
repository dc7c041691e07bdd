"""Labels: where in the user's code each node of autograd's graph was made."""

from dataclasses import dataclass
from typing import Any

from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, resolve_name

from normscope.anatomy.calls import ModuleCalls
from normscope.monitor.wrong.source import source_line
from normscope.subjects.feed import tensors_of


@dataclass(frozen=True)
class Label:
    """A place in the user's code.

    Attributes:
        module: path of the innermost running module.
        call: which call of it.
        function: PyTorch's function, such as "torch.nn.functional.linear"; "" if it is unknown.
        source: the line, "file.py:123: code".
    """

    module: str
    call: int
    function: str
    source: str


class Labels(TorchFunctionMode):
    """Mode that labels the nodes that each call of PyTorch's functions makes."""

    def __init__(self, calls: ModuleCalls) -> None:
        super().__init__()
        self._calls = calls
        self._function = ""
        self._of: dict[Node, Label] = {}

    def here(self) -> Label:
        """The label of what runs now."""
        call = self._calls.current
        return Label(call.path, max(call.nth, 0), self._function, source_line())

    def of(self, node: Node | None) -> Label | None:
        """The label of a node."""
        return None if node is None else self._of.get(node)

    @property
    def nodes(self) -> list[Node]:
        """All nodes with a label."""
        return list(self._of)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.label((*args, *(kwargs or {}).values()))  # nodes of `autograd.Function.apply`, which is not seen
        outer, self._function = self._function, resolve_name(func) or getattr(func, "__name__", "")
        try:
            result = func(*args, **(kwargs or {}))
            self.label((result, args[:1]))  # an assignment to a part returns nothing
        finally:
            self._function = outer
        return result

    def label(self, value: Any) -> None:
        """Label the nodes behind the tensors of `value` that have none yet with what runs now."""
        left: list[Node | None] = [tensor.grad_fn for tensor in tensors_of(value)]
        new = [node for node in left if node is not None and node not in self._of]
        if not new:
            return
        label = self.here()
        while new:
            node = new.pop()
            if node not in self._of and node.name() != "torch::autograd::AccumulateGrad":
                self._of[node] = label
                new += [each for each, _ in node.next_functions if each is not None]
