"""normscope.testing: the assertion, and the plugin in suites of its own."""

import re
import subprocess
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normscope
from normscope.errors import UsageError
from normscope.testing import assert_healthy

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
QUICK = {"steps": 2, "batch_size": 2, "seq_len": 16}
GOOD = "nn:decoder,scheme=pre,depth=2,width=16"


@pytest.fixture(scope="module")
def _imported() -> None:
    """Import all that a check needs: pytester forgets what its suites import, and torch cannot come twice."""
    model = normscope.nn.build("decoder", scheme="pre", depth=2, width=16)
    with pytest.raises(AssertionError):
        assert_healthy(model, steps=1, batch_size=2, seq_len=8, budget="standard", optimizer="adam", lr=1e9)


@pytest.fixture
def suite(_imported: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of tests that loads the plugin by its module, installed entry point or not."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\naddopts = -p normscope.testing.plugin")
    pytester.makeconftest("import torch\nfrom torch import nn")
    return pytester


def copies(depth: int = 3) -> nn.Module:
    """A Pre-LN stack of identical layers: a warning, and no error."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(16), enable_nested_tensor=False)


def square(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch).square().mean()


def test_a_healthy_model_passes_and_gives_its_report() -> None:
    report = assert_healthy(GOOD, **QUICK)
    assert report.verdict == "healthy"
    assert report.budget["name"] == "fast"
    model = normscope.nn.build("decoder", scheme="pre", depth=2, width=16)
    assert assert_healthy(model, budget="standard", **QUICK).budget["name"] == "standard"


def test_a_warning_fails_unless_it_is_let_pass() -> None:
    batch = torch.randn(2, 8, 16)
    with pytest.raises(AssertionError) as caught:
        assert_healthy(copies(), batch, square, steps=2)
    message = str(caught.value)
    assert message.startswith("TransformerEncoder: at risk\n  warning NS103 identical-blocks at layers.1")
    assert "→ Initialise again" in message
    assert "trial: adamw" in message
    assert assert_healthy(copies(), batch, square, steps=2, fail_on="error").verdict == "at risk"
    assert assert_healthy(copies(), batch, square, steps=2, ignore="NS103").verdict == "healthy"


def test_an_error_fails_in_both_ways() -> None:
    broken = copies()
    broken.layers[0].linear1.weight.data[0, 0] = float("nan")
    for fail_on in ("warning", "error"):
        with pytest.raises(AssertionError, match="will fail"):
            assert_healthy(broken, torch.randn(2, 8, 16), square, steps=2, fail_on=fail_on)


def test_no_trial_is_a_warning() -> None:
    with pytest.raises(AssertionError, match="no training step was tried: no steps were requested"):
        assert_healthy(GOOD, steps=0)
    assert assert_healthy(GOOD, steps=0, fail_on="error").verdict == "no trial"
    with pytest.raises(AssertionError, match="TransformerEncoder: no trial\n  no training step was tried: "):
        assert_healthy(copies(1), torch.randn(2, 8, 16), steps=2, ignore="NS1")


def test_a_bad_call_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="gpt2"):
        assert_healthy("hf:gtp2")
    with pytest.raises(UsageError, match="fail_on"):
        assert_healthy(GOOD, fail_on="never")  # type: ignore[arg-type]


def test_warnings_of_the_model_are_no_errors_of_the_check() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = normscope.nn.build("decoder", scheme="pre", depth=2, width=16)

        def forward(self, ids: Tensor) -> Tensor:
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            return self.inner(ids)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = assert_healthy(Noisy(), **QUICK)
    assert not any("could not measure" in note for note in report.notes)


def test_the_fixture_checks_with_the_budget_of_the_command_line(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        f"""
        def test_budget(normscope_check, request):
            report = normscope_check({GOOD!r}, steps=1, batch_size=2, seq_len=8)
            assert report.budget["name"] == request.config.getoption("--normscope-budget")

        def test_own_budget(normscope_check):
            report = normscope_check({GOOD!r}, steps=1, batch_size=2, seq_len=8, budget="standard")
            assert report.budget["name"] == "standard"
        """
    )
    suite.runpytest_inprocess("-W", "error").assert_outcomes(passed=2)
    done = suite.runpytest_inprocess("-W", "error", "--normscope-budget", "standard", "-k", "test_budget")
    done.assert_outcomes(passed=1, deselected=1)
    done = suite.runpytest_inprocess("--normscope-budget", "cheap")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--normscope-budget*invalid choice: 'cheap'*"])


def test_a_failure_shows_the_findings_and_none_of_our_code(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import torch
        from torch import nn
        from normscope.testing import assert_healthy

        def model():
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
            return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)

        def loss_fn(output, batch):
            return (output - batch).square().mean()

        def test_fixture(normscope_check):
            normscope_check(model(), torch.randn(2, 8, 16), loss_fn, steps=1)

        def test_function():
            assert_healthy(model(), torch.randn(2, 8, 16), loss_fn, steps=1)

        def test_usage(normscope_check):
            normscope_check("hf:gtp2")
        """
    )
    done = suite.runpytest_inprocess("--tb=long")
    done.assert_outcomes(failed=3)
    shown = done.stdout.str()
    assert len(re.findall(r"^E +warning NS103 identical-blocks at layers.1$", shown, flags=re.MULTILINE)) == 2
    assert len(re.findall(r"^E +→ Initialise again", shown, flags=re.MULTILINE)) == 2
    assert len(re.findall(r"^E .*UsageError: .*gpt2", shown, flags=re.MULTILINE)) == 1
    assert "healthy.py" not in shown
    assert "plugin.py" not in shown


def test_other_suites_do_not_wait_for_torch(suite: pytest.Pytester) -> None:
    """In a process of its own: this one has PyTorch already."""
    suite.makeconftest("")
    suite.makepyfile(
        "import sys\n\ndef test_lean():\n    assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error"],
        cwd=suite.path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"normscope": "normscope.testing.plugin"}
    assert hasattr(import_module("normscope.testing.plugin"), "normscope_check")


def test_the_page_runs_as_printed(suite: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    tests = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    suite.makepyfile(**{f"test_page_{number}": body for number, body in enumerate(tests)})
    suite.runpytest_inprocess("-W", "error").assert_outcomes(passed=len(tests))
