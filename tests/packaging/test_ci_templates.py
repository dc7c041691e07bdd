"""The GitHub Action, the GitLab job and the pre-commit hook run here, with stand-ins for those services."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS = ROOT / ".pre-commit-hooks.yaml"
TEMPLATE = yaml.safe_load((ROOT / "ci/gitlab/normscope.gitlab-ci.yml").read_text(encoding="utf-8"))
QUICK = "--steps 0 --budget fast --batch-size 2 --seq-len 16 --select 'post-ln-deep,missing-final-norm'"
HEALTHY = "nn:decoder,depth=1,width=16,heads=2"
MODEL_FILE = """
from normscope.nn import build as decoder


def build():
    return decoder("decoder", scheme="{scheme}", depth=1, width=16, heads=2)
"""
GH = """#!/usr/bin/env bash
echo "$*" >> "$GH_CALLS"
[ -z "${GH_REFUSES:-}" ] || exit 1
case "$*" in *--paginate*) printf '%s' "${GH_FOUND:-}" ;; esac
for word in "$@"; do
  case "$word" in body=@*) cp "${word#body=@}" "$GH_CALLS.body" ;; esac
done
"""


@dataclass
class Workflow:
    """A run of the Action: its folder, and what GitHub would set."""

    home: Path
    inputs: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    event: str = "pull_request"

    def __post_init__(self) -> None:
        self.outputs: dict[str, str] = {}
        given = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
        self.inputs = given | self.inputs
        stand_in(self.home / "bin/gh", GH)
        stand_in(
            self.home / "temp/normscope/bin/python", f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n'
        )

    def value(self, expression: str) -> str:
        """Value of what stands between `${{` and `}}`."""
        room, _, name = expression.strip().partition(".")
        if room == "inputs":
            return self.inputs[name]
        if room == "steps":
            return self.outputs[name.removeprefix("check.outputs.")]
        return {
            "github.action_path": str(ROOT),
            "github.token": "a-token",
            "github.event_name": self.event,
            "github.event.pull_request.number": "7",
            "runner.temp": str(self.home / "temp"),
        }[expression.strip()]

    def filled(self, words: str) -> str:
        return re.sub(r"\$\{\{(.*?)\}\}", lambda found: self.value(found[1]), words)

    def wanted(self, step: dict[str, Any]) -> bool:
        """Value of the step's `if`: comparisons with strings, joined by &&."""
        comparisons = step["if"].split("&&") if "if" in step else []
        sides = [comparison.split("==") for comparison in comparisons]
        return all(self.value(left) == right.strip().strip("'") for left, right in sides)

    def run(self, *names: str) -> subprocess.CompletedProcess[str]:
        """Run the steps of these ids in order, the last of which is returned."""
        steps = {step["id"]: step for step in ACTION["runs"]["steps"]}
        for name in names:
            if not self.wanted(steps[name]):
                continue
            done = self._run(steps[name])
            output = self.home / "output"
            lines = output.read_text().splitlines() if output.exists() else []
            self.outputs |= dict(line.split("=", 1) for line in lines)
        return done

    def _run(self, step: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "an input within a script is code that a stranger may write"
        environment = os.environ | {
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "GITHUB_OUTPUT": str(self.home / "output"),
            "GITHUB_STEP_SUMMARY": str(self.home / "summary.md"),
            "GITHUB_REPOSITORY": "someone/something",
            "GH_CALLS": str(self.home / "gh_calls"),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        }
        environment |= {name: self.filled(str(value)) for name, value in step.get("env", {}).items()}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.home,
            env=environment | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        path = self.home / "gh_calls"
        return path.read_text().splitlines() if path.exists() else []


def stand_in(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)


def marker(model: str) -> str:
    return f"<!-- normscope {hashlib.sha256(model.encode()).hexdigest()[:16]} -->"


# The Action -------------------------------------------------------------------------------------------


def test_every_step_is_known_and_every_output_is_set() -> None:
    assert [step["id"] for step in ACTION["runs"]["steps"]] == ["install", "check", "comment", "result"]
    for output in ACTION["outputs"].values():
        assert output["value"].startswith("${{ steps.check.outputs.")
    assert {name for name, one in ACTION["inputs"].items() if one.get("required")} == {"model"}


def test_a_check_with_findings_is_reported_and_fails(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL_FILE.format(scheme="pre"), encoding="utf-8")
    flow = Workflow(tmp_path, {"model": "model.py:build", "options": QUICK, "fail-on": "warning"})
    checked = flow.run("check")
    assert checked.returncode == 0, checked.stderr
    assert flow.outputs["status"] == "1"
    report = Path(flow.outputs["report"]).read_text(encoding="utf-8")
    assert report.startswith("### normscope: ")
    assert "--select post-ln-deep,missing-final-norm" in report
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == report

    assert flow.run("comment").returncode == 0
    asked, posted = flow.calls
    assert asked.startswith("api --paginate repos/someone/something/issues/7/comments")
    assert marker("model.py:build") in asked
    assert posted.startswith("api --silent -X POST repos/someone/something/issues/7/comments ")
    body = (tmp_path / "gh_calls.body").read_text(encoding="utf-8")
    assert body == f"{marker('model.py:build')}\n{report}"
    assert flow.run("result").returncode == 1


def test_the_next_push_updates_the_comment(tmp_path: Path) -> None:
    flow = Workflow(tmp_path, {"model": HEALTHY}, {"GH_FOUND": "41\n42\n"})
    (tmp_path / "temp/normscope.md").write_text("### normscope: healthy\n", encoding="utf-8")
    assert flow.run("comment").returncode == 0
    assert flow.calls[1].startswith("api --silent -X PATCH repos/someone/something/issues/comments/41 ")
    assert len(flow.calls) == 2


def test_a_token_that_may_not_comment_fails_nothing(tmp_path: Path) -> None:
    """Pull requests from forks have one that only reads."""
    flow = Workflow(tmp_path, {"model": HEALTHY}, {"GH_REFUSES": "1"})
    (tmp_path / "temp/normscope.md").write_text("### normscope: healthy\n", encoding="utf-8")
    done = flow.run("comment")
    assert done.returncode == 0
    assert done.stdout.startswith("::notice::")


@pytest.mark.parametrize(("comment", "event"), [("false", "pull_request"), ("true", "push")])
def test_no_comment_where_none_is_wanted(comment: str, event: str, tmp_path: Path) -> None:
    flow = Workflow(tmp_path, {"model": HEALTHY, "comment": comment}, event=event)
    (step,) = [step for step in ACTION["runs"]["steps"] if step["id"] == "comment"]
    assert not flow.wanted(step)


@pytest.mark.parametrize("model", ["nn:decodr", "; touch hacked", "$(touch hacked)", "--help"])
def test_a_model_that_cannot_be_used_exits_2_and_says_why(model: str, tmp_path: Path) -> None:
    flow = Workflow(tmp_path, {"model": model})
    assert flow.run("check").returncode == 0
    assert flow.run("result").returncode == 2
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith("### normscope: the model could not be checked\n\n    normscope: ")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("has_torch", [True, False])
def test_install_takes_the_torch_that_is_there(has_torch: bool, tmp_path: Path) -> None:
    flow = Workflow(tmp_path, {"model": HEALTHY, "extras": "hf,vision"})
    inner = f'#!/usr/bin/env bash\necho "$*" >> calls\n[ "$1" != -c ] || exit {int(not has_torch)}\n'
    stand_in(tmp_path / "temp/normscope/bin/python", inner)
    stand_in(tmp_path / "bin/python3", '#!/usr/bin/env bash\necho "$*" >> calls\n')
    assert flow.run("install").returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == f"-m venv --system-site-packages {tmp_path}/temp/normscope"
    assert calls[-1] == f"-m pip install --quiet {ROOT}[hf,vision]"
    torch = "-m pip install --quiet torch --index-url https://download.pytorch.org/whl/cpu"
    assert (torch in calls) is not has_torch


# GitLab -----------------------------------------------------------------------------------------------


class Notes(BaseHTTPRequestHandler):
    """The few calls of GitLab's API that the job makes; the notes come on two pages."""

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.calls.append((self.command, self.path, body))  # type: ignore[attr-defined]
        assert self.headers["PRIVATE-TOKEN"] == "secret"
        pages = self.server.pages  # type: ignore[attr-defined]
        page = int(found[1]) if (found := re.search(r"[?&]page=(\d+)", self.path)) else 0
        answer = {"id": 5} if self.path.endswith("/user") else pages[page - 1] if page else {}
        self.send_response(200)
        self.send_header("X-Next-Page", str(page + 1) if 0 < page < len(pages) else "")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST = do_PUT = _answer

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def gitlab() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Notes)
    server.calls, server.pages = [], [[]]  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def job(home: Path, server: ThreadingHTTPServer | None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the job's script as the runner does, with a token where there is a server."""
    (home / "bin").mkdir(exist_ok=True)
    stand_in(home / "bin/python3", f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n')
    given = {name: str(value) for name, value in TEMPLATE["normscope"]["variables"].items()} | variables
    environment = os.environ | given
    environment |= {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"CI_PROJECT_ID": "3", "CI_MERGE_REQUEST_IID": "9", "OMP_NUM_THREADS": "1"}
    if server is not None:
        environment |= {
            "NORMSCOPE_TOKEN": "secret",
            "CI_API_V4_URL": f"http://127.0.0.1:{server.server_port}/v4",
        }
    script = "\n".join(TEMPLATE["normscope"]["script"])
    command = ["bash", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)


def test_the_job_posts_a_note_and_exits_as_the_check(tmp_path: Path, gitlab: ThreadingHTTPServer) -> None:
    (tmp_path / "model.py").write_text(MODEL_FILE.format(scheme="pre"), encoding="utf-8")
    done = job(
        tmp_path,
        gitlab,
        NORMSCOPE_MODEL="model.py:build",
        NORMSCOPE_OPTIONS=QUICK,
        NORMSCOPE_FAIL_ON="warning",
    )
    assert done.returncode == 1, done.stderr
    report = (tmp_path / "normscope.md").read_text(encoding="utf-8")
    assert done.stdout == report
    method, path, body = gitlab.calls[-1]  # type: ignore[attr-defined]
    assert (method, path) == ("POST", "/v4/projects/3/merge_requests/9/notes")
    assert body == {"body": f"{marker('model.py:build')}\n{report}"}


def test_the_job_updates_its_own_note(tmp_path: Path, gitlab: ThreadingHTTPServer) -> None:
    body = f"{marker('nn:decodr')}\nbefore"
    others = [{"id": 1, "body": body, "author": {"id": 6}}, {"id": 2, "body": "?", "author": {"id": 5}}]
    gitlab.pages = [others, [{"id": 3, "body": body, "author": {"id": 5}}]]  # type: ignore[attr-defined]
    assert job(tmp_path, gitlab, NORMSCOPE_MODEL="nn:decodr").returncode == 2
    method, path, _ = gitlab.calls[-1]  # type: ignore[attr-defined]
    assert (method, path) == ("PUT", "/v4/projects/3/merge_requests/9/notes/3")
    assert "could not be checked" in (tmp_path / "normscope.md").read_text(encoding="utf-8")


def test_the_job_without_a_token_or_a_server_still_reports(tmp_path: Path) -> None:
    assert job(tmp_path, None, NORMSCOPE_MODEL="nn:decodr").returncode == 2
    absent = {"NORMSCOPE_TOKEN": "secret", "CI_API_V4_URL": "http://127.0.0.1:9/v4"}
    done = job(tmp_path, None, NORMSCOPE_MODEL="nn:decodr", **absent)
    assert done.returncode == 2
    assert "may not comment here" in done.stderr


def test_the_job_needs_a_package_and_a_model(tmp_path: Path) -> None:
    script = "\n".join(TEMPLATE["normscope"]["before_script"])
    environment = os.environ | {"NORMSCOPE_PACKAGE": "", "NORMSCOPE_MODEL": HEALTHY}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "NORMSCOPE_PACKAGE" in done.stderr


# pre-commit ------------------------------------------------------------------------------------------


def test_the_hook_passes_and_fails(tmp_path: Path, shell) -> None:
    (hook,) = yaml.safe_load(HOOKS.read_text(encoding="utf-8"))
    assert hook["pass_filenames"] is False, "args name the model, not the files that changed"
    words = [*shlex.split(hook["entry"]), "model.py:build", "--expect", "pre"]
    for scheme, status in (("pre", 0), ("post", 1)):
        (tmp_path / "model.py").write_text(MODEL_FILE.format(scheme=scheme), encoding="utf-8")
        assert shell(words, tmp_path).returncode == status
