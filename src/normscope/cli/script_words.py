"""Words behind `--`: the command of a training script, for `check` and `watch`."""

import shlex
from collections.abc import Sequence

from normscope.errors import UsageError

SCRIPT = "normscope.script"
"""Key of the context's `meta` for the words of a training script; None without `--`."""
_INSTEAD_OF_SCRIPT = {
    "plan": "or call normscope.plan in the script",
    "anatomy": "or call normscope.read_anatomy in the script",
    "train": "or run `normscope check -- …` to judge the script",
    "map": "or run `normscope check -- …` to judge the script",
    "diff": "or give a file that holds the command, such as `-- python train.py`",
}
"""Commands that take a MODEL and no script: what else there is to do."""


def words_of_script(command: str | None, arguments: Sequence[str]) -> list[str] | None:
    """The words behind `--`, the command of a training script; None without `--`.

    Raises:
        UsageError: there are none, or the command takes none.
    """
    if "--" not in arguments:
        return None
    words = list(arguments[list(arguments).index("--") + 1 :])
    if command not in ("check", "watch"):
        _refuse_script(command, words)
        return None
    if command == "check" and len(words) == 1 and ":" in words[0]:
        return None  # a MODEL, kept apart from the options
    if not words:
        given = f"{command} -- without a command"
        raise UsageError(given, "the command of a training script", f"write {command} -- python train.py")
    return words


def _refuse_script(command: str | None, words: Sequence[str]) -> None:
    file = next((word for word in words if word.endswith(".py")), None)
    if command not in _INSTEAD_OF_SCRIPT or file is None:
        return
    raise UsageError(
        f"{command} -- {shlex.join(words)}",
        "a MODEL, because only check and watch take the command of a script",
        f"write a factory (`normscope init {shlex.quote(file)}` does) and give FILE.py:FACTORY, "
        f"{_INSTEAD_OF_SCRIPT[command]}",
    )
