"""Parameters by the names an anatomy uses, and which of them belong to a block."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from torch import nn

from normscope.anatomy import Anatomy, Block, named_parameters


class Parameters:
    """The floating-point parameters of a model, by name and by block.

    A tied parameter has several names and counts once. Where no parameter requires a gradient, all count as
    trained, and `are_frozen` is True.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        named = named_parameters(model, remove_duplicate=False)
        self.by_name: dict[str, nn.Parameter] = {name: p for name, p in named if p.is_floating_point()}
        self.names = {id(p): name for name, p in reversed(self.by_name.items())}
        """The first name of each parameter, by id."""
        self._places = {name: place for place, name in enumerate(self.by_name)}
        self._below: dict[str, list[str]] = defaultdict(list)
        """Path of a module → names of all its parameters."""
        for name in self.by_name:
            path = name.rpartition(".")[0]
            while path:
                self._below[path].append(name)
                path = path.rpartition(".")[0]
        trained = {id(p) for p in self.by_name.values() if p.requires_grad}
        self.are_frozen = not trained
        self._trained = trained or set(self.names)
        self._calls = Counter(block.path for block in anatomy.blocks)
        self._runs = Counter((block.path, block.call) for block in anatomy.blocks)

    def all(self) -> list[nn.Parameter]:
        """Every parameter once, in the model's order."""
        return list({id(p): p for p in self.by_name.values()}.values())

    def trained(self) -> list[nn.Parameter]:
        """Parameters that the user trains."""
        return self._kept(self.by_name.values())

    def of_block(self, block: Block) -> list[nn.Parameter]:
        """Parameters that the user trains in a block: in its module, and in its branches outside of that.

        XLM keeps its feed-forwards in a list of their own; blocks written out in one module share it.
        """
        norms = [norm.weight for branch in block.branches for norm in branch.norms]
        inside = {*norms, *(projection.parameter for b in block.branches for projection in b.projections)}
        names = {name for name in inside if name in self.by_name}
        prefixes = [branch.path for branch in block.branches]
        if self._runs[block.path, block.call] == 1:
            prefixes.append(block.path)
        for prefix in filter(None, prefixes):
            names.update(self._below.get(prefix, ()))
        return self._kept(self.by_name[name] for name in sorted(names, key=self._places.__getitem__))

    def sharing(self, block: Block) -> str:
        """Addition to `how` where several blocks run one module, else ""."""
        calls = self._calls[block.path]
        if calls == self._runs[block.path, block.call]:
            return ""
        return f"; summed over the {calls} calls that share these weights"

    def _kept(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return list({id(p): p for p in parameters if id(p) in self._trained}.values())
