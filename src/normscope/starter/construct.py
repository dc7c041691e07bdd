"""The code that constructs a model, with the values that the user's code gives."""

import ast
import keyword
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from normscope.starter.scan import Call, Class, Project, Source, assignments, called
from normscope.starter.values import UNKNOWN, assigned_to, neutral, value_of

_CONFIGS = {"config", "cfg", "conf", "args", "hparams", "params", "configuration", "model_args", "hp"}
_CONFIG_CLASS = re.compile(r".*(Config|Args|Arguments|HParams|Params|Options)")
_STARTERS = {"main", "train", "run", "fit", "backward", "step"}  # calls that start the work of a script
_LONGEST = 96  # characters of a line
Given = defaultdict[str, list[tuple[Source, ast.expr]]]
"""Argument → expressions that the code gives for it, each with its file."""


class Construction:
    """Lines of code that construct a model.

    Attributes:
        lines: the lines, of which the last binds `model`.
        imports: lines that import what they use.
        guessed: neutral values, "vocab_size=256", for what the code does not give.
    """

    def __init__(self, source: Source, node: ast.ClassDef | ast.Call, project: Project, folder: Path) -> None:
        self.lines: list[str] = []
        self.imports: list[str] = []
        self.guessed: list[str] = []
        self._project, self._folder = project, folder
        self._open: list[ast.Call] = []
        if isinstance(node, ast.Call):
            self._bind("model", self._of_library(node, source))
        else:
            self._bind(
                "model", self._of_class(project.classes[node.name], project.calls[node.name], say=True)
            )

    def _bind(self, name: str, call: ast.Call) -> None:
        """Add `name = call`; an argument on each line where one is to do or the line gets long."""
        whole = f"{name} = {ast.unparse(call)}"
        if len(whole) <= _LONGEST and "TODO(" not in whole:
            self.lines.append(whole)
        else:
            arguments = [f"    {ast.unparse(each)}," for each in (*call.args, *call.keywords)]
            self.lines += [f"{name} = {ast.unparse(call.func)}(", *arguments, ")"]

    def _of_class(self, root: Class, calls: Sequence[Call], *, say: bool = False) -> ast.Call:
        """The call of a class of the folder, without arguments that have defaults and are not given.

        Args:
            calls: the calls in the code; the values are those of one of them.
            say: whether a comment says which one.
        """
        self.imports += _imports(root, self._folder)
        names = [each.arg for each, _ in root.arguments]
        call = self._fullest(calls, names)
        given = _given([] if call is None else [call], names)
        is_taken = False
        keywords = []
        for argument, default in root.arguments:
            name = argument.arg
            value: ast.expr | None = ast.Name("config")
            if (config := self._config_of(argument, default, root)) is not None:
                self._add_config(config)
            elif name in _CONFIGS and (method := root.method("get_default_config")) is not None:
                self._add_default_config(root, method, calls)
            elif (value := self._known(given, name)) is not None:
                is_taken = True
            elif default is None:
                value = self._guess(name, f"{root.name}(…)")
            if value is not None:
                keywords.append(ast.keyword(name, value))
        if say and call is not None and is_taken:
            self._say_where(root.name, call, calls)
        return ast.Call(ast.Name(root.name), [], keywords)

    def _fullest(self, calls: Sequence[Call], names: Sequence[str]) -> Call | None:
        """The call that gives the most values; of equals that of a training script, else the first.

        Values of several calls are never mixed: the width of one run and the heads of another may not fit.
        """

        def rank(call: Call) -> tuple[int, bool]:
            return self._num_known(_given([call], names)), "train" in call[0].path.stem

        return max(calls, key=rank, default=None)

    def _num_known(self, given: Given) -> int:
        """Number of arguments that the stub can have; what that finds on the way is forgotten."""
        lists = (self.lines, self.imports, self.guessed)
        before = [len(each) for each in lists]
        known = sum(self._known(given, name) is not None for name in list(given))
        for each, length in zip(lists, before, strict=True):
            del each[length:]
        return known

    def _say_where(self, name: str, chosen: Call, calls: Sequence[Call]) -> None:
        """Add a comment with the place whose values are taken, and the others."""
        others = [self._place(call) for call in calls if call is not chosen]
        more = ", …" if len(others) > 2 else "."
        self.lines.append(f"# The values of {self._place(chosen)}.")
        if others:
            self.lines.append(f"# {name} is also constructed in {', '.join(others[:2])}{more}")

    def _place(self, call: Call) -> str:
        return f"{call[0].path.relative_to(self._folder).as_posix()}, line {call[1].lineno}"

    def _of_library(self, call: ast.Call, source: Source) -> ast.Call:
        """The call of a class of a library, with the arguments that it has in the code."""
        self.imports.append(source.libraries[_first_name(call.func)])

        of = f"{called(call)}(…)"

        def put(node: ast.expr, name: str | None) -> ast.expr:
            return self._resolved(node, source) or self._guess(name or ast.unparse(node), of)

        keywords = [ast.keyword(each.arg, put(each.value, each.arg)) for each in call.keywords]
        return ast.Call(call.func, [put(each, None) for each in call.args], keywords)

    def _known(self, given: Given, name: str) -> ast.expr | None:
        """The first expression for an argument that the stub can have too."""
        resolved = (self._resolved(node, source) for source, node in given[name])
        return next((each for each in resolved if each is not None), None)

    def _guess(self, name: str, of: str) -> ast.expr:
        """A neutral value, or TODO."""
        value = neutral(name)
        if value is UNKNOWN:
            words = f"write {name} of {of}".replace('"', "'")
            return ast.Name(f'TODO("{words}")')
        self.guessed.append(f"{name}={value!r}")
        return ast.Constant(value)

    def _resolved(self, node: ast.expr, source: Source) -> ast.expr | None:
        """An expression that means the same in the stub, or None."""
        value = value_of(node, source)
        if value is not UNKNOWN:
            return ast.Constant(value)
        for each in (node, *assigned_to(node, source)):
            if isinstance(each, ast.Call) and each not in self._open:  # model = DataParallel(model) is open
                self._open.append(each)
                found = self._resolved_call(each, source)
                self._open.pop()
                if found is not None:
                    return found
        if isinstance(node, ast.Call) or _first_name(node) not in source.libraries:
            return None
        self.imports.append(source.libraries[_first_name(node)])  # torch.float32
        return node

    def _resolved_call(self, call: ast.Call, source: Source) -> ast.Call | None:
        if _first_name(call.func) in source.libraries:
            return self._of_library(call, source)
        root = self._project.classes.get(called(call))
        return None if root is None else self._of_class(root, [(source, call)])

    def _config_of(self, argument: ast.arg, default: ast.expr | None, root: Class) -> Class | None:
        """The class of a configuration that an argument takes: by its annotation, else by its name."""
        classes = self._project.classes
        for name in re.findall(r"\w+", ast.unparse(argument.annotation) if argument.annotation else ""):
            if name in classes and name not in self._project.modules:
                return classes[name]
        if argument.arg not in _CONFIGS or default is not None:
            return None
        configs = [each for name, each in classes.items() if _CONFIG_CLASS.fullmatch(name) and each != root]
        own = f"{root.name}Config"
        return min(configs, key=lambda c: (c.name != own, c.source is not root.source), default=None)

    def _add_config(self, config: Class) -> None:
        """Add `config = Config(…)` with what the code gives; a comment lists the defaults that remain."""
        call = self._of_class(config, self._project.calls[config.name], say=True)
        given = {each.arg for each in call.keywords}
        left = [f"{a.arg}={ast.unparse(d)}" for a, d in config.arguments if d and a.arg not in given]
        if left:
            self.lines.append(f"# Left at the defaults of {config.name}: {', '.join(left)}.")
            self.lines.append("# Write the values of your run where it has others.")
        self._bind("config", call)

    def _add_default_config(self, root: Class, method: ast.FunctionDef, calls: Sequence[Call]) -> None:
        """Add `config = Model.get_default_config()` with what scripts set on it, as minGPT has it."""
        variables = {ast.unparse(each).split(".")[-1] for _, call in calls for each in call.args[:1]}
        by_source = [_set_on(variables, source) for source in self._project.sources]
        given = max(by_source, key=self._num_known)
        self.lines.append(f"config = {root.name}.get_default_config()")
        for target, (default, *_) in assignments(method).items():
            name = target.split(".")[-1]
            value = self._known(given, name)
            is_set = ast.unparse(default) != "None" or ("model_type" in given and neutral(name) is UNKNOWN)
            if "." in target and (value is not None or not is_set):
                value = value or self._guess(name, f"the config of {root.name}")
                self.lines.append(f"config.{name} = {ast.unparse(value)}")


def _set_on(variables: set[str], source: Source) -> Given:
    """Values that a file sets on the attributes of a configuration."""
    given: Given = defaultdict(list)
    for target, values in assignments(source.tree).items():
        if set(target.split(".")[-2:-1]) & variables:
            given[target.split(".")[-1]] += [(source, value) for value in values]
    return given


def _imports(root: Class, folder: Path) -> list[str]:
    """The import of a class; before it a TODO where importing would train, and the folder if need be."""
    path, lines = root.source.path, list[str]()
    for node in root.source.tree.body:
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if isinstance(node, ast.For | ast.While) or (call is not None and called(call) in _STARTERS):
            loop = f"the loop of {path.relative_to(folder)}, line {node.lineno}"
            do = f"put {loop}, under `if __name__ == '__main__':`, then delete this line"
            lines.append(f'TODO("{do}")')
            break
    top = path.parent
    while (top / "__init__.py").is_file() and top != folder:
        top = top.parent
    if top != folder:
        inner = top.relative_to(folder).as_posix()
        lines.append(f"sys.path.insert(0, str(Path(__file__).resolve().parent / {inner!r}))")
    parts = path.relative_to(top).with_suffix("").parts
    module = ".".join(parts).removesuffix(".__init__")
    if all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        return [*lines, f"from {module} import {root.name}"]
    if "." in "".join(parts):
        lines.append(
            f'TODO("rename {path.name}: Python cannot import a name with a dot, then change the next line")'
        )
    return [
        *lines,
        "from importlib import import_module",
        f"{root.name} = import_module({module!r}).{root.name}",
    ]


def _given(calls: Sequence[Call], names: Sequence[str]) -> Given:
    """Expressions that the calls give, by argument."""
    found: Given = defaultdict(list)
    for source, call in calls:
        is_starred = any(isinstance(value, ast.Starred) for value in call.args)
        for name, value in zip(names, () if is_starred else call.args, strict=False):
            found[name].append((source, value))
        for each in call.keywords:
            pairs = _entries(each.value, source) if each.arg is None else [(each.arg, each.value)]
            for name, value in pairs:
                found[name].append((source, value))
    return found


def _entries(mapping: ast.expr, source: Source) -> Iterator[tuple[str, ast.expr]]:
    """Entries of a dict that is given as `**mapping`; None is a place that the code fills later."""
    for each in (mapping, *assigned_to(mapping, source)):
        entries: list[tuple[str | None, ast.expr]] = []
        if isinstance(each, ast.Call) and called(each) == "dict":
            entries = [(one.arg, one.value) for one in each.keywords]
        elif isinstance(each, ast.Dict):
            entries = [
                (value_of(key, source), value)
                for key, value in zip(each.keys, each.values, strict=True)
                if key
            ]
        for name, value in entries:
            later = assignments(source.tree).get(f"{ast.unparse(mapping)}[{name!r}]", [])
            for given in (*later, value):
                if isinstance(name, str) and ast.unparse(given) != "None":
                    yield name, given


def _first_name(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[0]
