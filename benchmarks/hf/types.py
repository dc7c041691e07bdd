"""Build every model type of transformers small and read it: read, "unread" with the reason, or not built.

    python -m benchmarks.hf.types [TYPE…] [--output FILE.jsonl]

One line a type: what was built and fed, the stacks as they were read, and what was not read. A type "attends"
where the class of one of its modules is named as an attention or a state-space mixer; the others are
convolutional. The labels of the types, taken by hand from their source, are in tests/anatomy/hf_models.py.
"""

import argparse
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING

from benchmarks.hf.small import built
from normscope.anatomy import read_anatomy

MIXERS = re.compile(r"attention|attn|mamba|ssm|mixer|rwkv|xlstm|fourier|recurrent", re.IGNORECASE)
FAILED = "cannot read this model"


def row(model_type: str) -> dict[str, Any]:
    """Result of a type: built or not, read or not, and the reason."""
    begin = time.monotonic()
    found: dict[str, Any] = {"type": model_type}
    try:
        model, batch = built(model_type)
    except Exception as error:
        words = " ".join(str(error).split())
        return found | {"state": "not built", "reason": f"{type(error).__name__}: {words}"[:300]}
    found |= {"class": type(model).__name__, "fed": sorted(batch), "attends": attends(model)}
    anatomy = read_anatomy(model, batch)
    failed = any(FAILED in words for words in anatomy.unread)
    state = "failed" if failed else "unread" if anatomy.unread else "read"
    found |= {"stacks": [len(stack.blocks) for stack in anatomy.stacks], "unread": list(anatomy.unread)}
    return found | {"state": state, "seconds": round(time.monotonic() - begin, 2)}


def attends(model: nn.Module) -> bool:
    """True where a module mixes tokens by attention or a state, by the name of its class."""
    return any(MIXERS.search(type(module).__name__) for module in model.modules())


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Counts of the states, of all types and of those that attend."""
    whole = Counter(each["state"] for each in rows)
    attending = Counter(each["state"] for each in rows if each.get("attends"))
    return f"{len(rows)} types: {dict(whole)}; with attention or a state: {dict(attending)}"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Parser with the types, all by default, and the file of the rows."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", default=list(CONFIG_MAPPING.keys()))
    parser.add_argument("--output", type=Path)
    return parser


def rows_of(
    types: Sequence[str], output: Path | None, row: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Row of each type, printed and added to the file."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for model_type in types:
        rows.append(found := row(model_type))
        print(json.dumps(found), flush=True)
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
    return rows


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    print(summary(rows_of(arguments.types, arguments.output, row)))


if __name__ == "__main__":
    main()
