"""The likely root model among the classes of a folder."""

import ast
import re

from normscope.starter.scan import Class, Project, Source

_STACKS = {"ModuleList", "Sequential", "TransformerEncoder", "TransformerDecoder", "Transformer"}
_PARTS = re.compile(r"Block|Layer|Attention|Norm|Head$|Embed|Encoding|Loss")
_OF_LIBRARIES = re.compile(r"Transformer(Encoder|Decoder)?|\w+(LMHeadModel|For[A-Z]\w+)|\w+Model")


def candidates(project: Project) -> dict[str, tuple[Source, ast.ClassDef | ast.Call]]:
    """Models by name, the likeliest first: classes of modules, then what scripts construct from libraries."""
    modules = project.modules
    children = {name for each in modules.values() for name in each.calls & modules.keys() - {each.name}}
    ranked = sorted(modules.values(), key=lambda each: -_score(each, project, each.name in children))
    found: dict[str, tuple[Source, ast.ClassDef | ast.Call]] = {}
    for each in ranked:
        found[each.name] = each.source, each.node
    for name in filter(_OF_LIBRARIES.fullmatch, list(project.calls)):
        for source, call in project.calls[name]:
            if ast.unparse(call.func).split(".")[0] in source.libraries:
                found.setdefault(name, (source, call))
    return found


def _score(root: Class, project: Project, is_child: bool) -> int:
    """Likelihood that a class is the model that is trained: a script constructs it, no other contains it."""
    parts = _parts(root, project.modules, {})
    calls = set().union(*(part.calls for part in parts.values()))
    path = root.source.path
    is_test = path.name.startswith("test_") or path.parent.name in ("test", "tests")
    score = 4 * (root.name in project.calls) - 6 * is_child - 5 * is_test - 2 * bool(_PARTS.search(root.name))
    return score + min(4, len(parts) - 1) + 3 * bool(calls & _STACKS) + 2 * ("Embedding" in calls)


def _parts(root: Class, modules: dict[str, Class], found: dict[str, Class]) -> dict[str, Class]:
    """The class, its bases and what they construct, over all levels."""
    found[root.name] = root
    for name in {*root.calls, *(base.split(".")[-1] for base in root.bases)} & modules.keys():
        if name not in found:
            _parts(modules[name], modules, found)
    return found
