"""Import on first use: `import normscope` and `--help` load none of the heavy packages."""

import subprocess
import sys

import pytest

import normscope

HEAVY = ("torch", "numpy", "scipy", "matplotlib", "transformers", "jinja2", "safetensors", "sklearn", "ray")
LIGHT_CALLS = (
    "import normscope",
    "import normscope; dir(normscope); normscope.__version__",
    "import normscope; normscope.UsageError",
    "import normscope.cli",
    "from normscope.cli.main import run; run(['--help'])",
    "from normscope.cli.main import run; run(['check', '--help'])",
    "from normscope.cli.main import main\ntry: main(['--version'])\nexcept SystemExit: pass",
    "from normscope.cli.main import run; run(['no-such-command'])",
)


@pytest.mark.parametrize("call", LIGHT_CALLS)
def test_heavy_packages_are_not_loaded(call: str) -> None:
    code = f"{call}\nimport sys; print('loaded:', *sorted(sys.modules.keys() & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_first_use_leaves_the_random_generator_alone() -> None:
    """A package that is imported on first use draws from Python's generator."""
    code = (
        "import random, normscope; was = random.getstate(); normscope.check; assert was == random.getstate()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dir_lists_all_public_names() -> None:
    assert set(normscope.__all__) | {"__version__", "__doc__"} <= set(dir(normscope))
    assert dir(normscope) == sorted(dir(normscope))


@pytest.mark.parametrize("name", normscope.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(normscope, name).__name__.rpartition(".")[2] == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'chekc'"):
        normscope.chekc  # noqa: B018
