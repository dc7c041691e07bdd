"""The likely root model among the classes of a folder."""

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from normscope.starter.scan import Argument, Class, Source, arguments_of, called

_MODULES = re.compile(
    r"((torch\.)?nn\.)?Module|(torch\.)?nn\.\w+|(\w+\.)?LightningModule|(\w+\.)?\w*PreTrainedModel|"
    r"(\w+\.)?\w+(LMHeadModel|For[A-Z]\w+)"
)
_CONTAINERS = {"ModuleList", "Sequential", "ModuleDict"}
_STACKS = {"ModuleList", "TransformerEncoder", "TransformerDecoder", "Transformer"}
_INPUTS = {"idx", "ids", "input_ids", "tokens", "x", "src", "inputs", "input", "images", "tgt"}
_PARTS = re.compile(
    r"Block|Layer|Attention|MLP|FeedForward|Norm|Head$|Embed|Encoding|Loss|Dataset|Optim|Config"
)
_WHOLES = re.compile(r"GPT|Transformer|Model|LM|ViT|Bert|Llama|Net\b", re.IGNORECASE)


@dataclass(frozen=True)
class Candidate:
    """A class that derives from nn.Module.

    Attributes:
        score: how likely it is the model that is trained.
        made_at: where code outside of modules constructs it: file and call; none where none does.
        parts: classes of the folder that it is made of, itself first.
    """

    root: Class
    score: int
    made_at: tuple[tuple[Source, ast.Call], ...]
    parts: tuple[Class, ...]

    @cached_property
    def forward(self) -> list[Argument]:
        """Arguments of its forward, own or inherited."""
        found = (method for part in self.parts if (method := part.method("forward")) is not None)
        own = self.root.method("forward") or next(found, None)
        return [] if own is None else arguments_of(own)

    @cached_property
    def calls(self) -> set[str]:
        """Last names of all that it and its parts call."""
        return set().union(*(part.calls for part in self.parts))

    @cached_property
    def text(self) -> str:
        """The source of it and of its parts, without comments."""
        return "\n".join(ast.unparse(part.node) for part in self.parts)


def candidates(sources: Sequence[Source]) -> list[Candidate]:
    """Every module class, the likeliest root first."""
    modules = _modules([each for source in sources for each in source.classes])
    outside = [(source, call) for source in sources for call in source.calls_outside]
    children = {
        name for each in modules.values() for name in each.calls & modules.keys() if name != each.name
    }
    found = []
    for each in modules.values():
        made_at = tuple((source, call) for source, call in outside if called(call) == each.name)
        parts = tuple(_parts(each, modules))
        found.append(
            Candidate(each, _score(each, parts, bool(made_at), each.name in children), made_at, parts)
        )
    return sorted(found, key=lambda each: -each.score)


def _modules(classes: Iterable[Class]) -> dict[str, Class]:
    """Name → class, of those that derive from nn.Module, over other classes of the folder too."""
    found: dict[str, Class] = {}
    waiting = list(classes)
    while True:
        new = [c for c in waiting if any(_MODULES.fullmatch(b) or b.split(".")[-1] in found for b in c.bases)]
        if not new:
            return found
        for each in new:
            found.setdefault(each.name, each)
        waiting = [each for each in waiting if each not in new]


def _parts(root: Class, modules: dict[str, Class]) -> list[Class]:
    """The class, its bases and what they construct, over all levels."""
    found, waiting = {root.name: root}, [root]
    while waiting:
        each = waiting.pop(0)
        for name in sorted({*each.calls, *(base.split(".")[-1] for base in each.bases)} & modules.keys()):
            if name not in found:
                found[name] = modules[name]
                waiting.append(modules[name])
    return list(found.values())


def _score(each: Class, parts: tuple[Class, ...], is_made: bool, is_child: bool) -> int:
    forward = each.method("forward")
    takes = [argument.name for argument in arguments_of(forward)] if forward is not None else []
    calls = set().union(*(part.calls for part in parts))
    score = 4 * is_made - 6 * is_child + min(4, len(parts) - 1)
    score += 3 * bool(set(takes[:1]) & _INPUTS) - 3 * (
        forward is None and not each.bases[0].endswith("Model")
    )
    score += 3 * bool(calls & _STACKS) + 2 * ("Embedding" in calls) + bool(calls & _CONTAINERS)
    score += bool(_WHOLES.search(each.name)) - 2 * bool(_PARTS.search(each.name))
    path = each.source.path
    is_test = path.name.startswith("test_") or path.parent.name in ("test", "tests")
    return score - 5 * is_test
