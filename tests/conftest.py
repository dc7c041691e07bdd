"""Tests use two threads at most, one where OMP_NUM_THREADS=1 or in each worker of `make test`."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its kernels are made then

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` of a script starts with Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until the tests are collected: searching their 700,000 objects takes a quarter of that time


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what imports and collection have made."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def no_function_modes() -> None:
    """Leave the modes of torch functions in which an earlier test of this worker may have ended."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _json_on_stdout_follows_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate each JSON document that a command prints in any test against the schema that it names."""
    from normscope.cli import output

    write = output._to_stdout

    def checked(text: str) -> None:
        if text.startswith(("{", "[")):
            require_schema(json.loads(text))
        write(text)

    monkeypatch.setattr(output, "_to_stdout", checked)


def require_schema(document: Any) -> None:
    """Fail unless the document names a schema and follows it; a schema must be a valid one."""
    import jsonschema

    from normscope.schemas import schema

    if "$schema" in document:
        jsonschema.Draft202012Validator.check_schema(document)
        return
    head = document[0] if isinstance(document, list) and document else document
    assert "schema" in head, f"a document that names no schema: {sorted(head)[:9]}"
    jsonschema.Draft202012Validator(schema(head["schema"])).validate(document)


@pytest.fixture
def shell(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[Sequence[str], Path], subprocess.CompletedProcess[str]]:
    """Run the words of a `normscope` command in a folder, as a shell would but within this process.

    Starting Python and importing PyTorch costs seconds of processor time for each command.
    """

    from normscope.cli import main  # most tests need no command line

    def in_folder(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", list(words))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(list(words), ended.value.code, *capfd.readouterr())

    return in_folder
