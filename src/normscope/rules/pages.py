"""Full explanation of each finding: on the terminal, and as the page docs/findings.md."""

from normscope.rules.codes import find_record
from normscope.rules.rule import ALARMS, RULES, Record

_PARTS = (
    ("What it says", "summary"),
    ("Why it matters", "why"),
    ("Threshold", "threshold"),
    ("Source", "source"),
    ("Remedy", "remedy"),
)
_HEAD = """\
# Findings

`python -m normscope.rules > docs/findings.md` writes this page from the rules; `normscope explain CODE`
prints one section. The name of a finding leads to its page, with a picture of a healthy and a broken model.

Severity: an *error* makes the verdict "will fail", a *warning* "at risk", a *note* leaves it "healthy".
Instead of "healthy" the verdict is "no trial" where no training step could be run (no loss, `--steps 0`), and
"interrupted" where Ctrl-C stopped the check.
Structure alone is at most a warning. A finding about half precision is a note unless the model or `--dtype`
uses that precision, or values would overflow it. The measurements behind the thresholds are in
[thresholds.md](thresholds.md), those of NS701 to NS713 in [wiring-thresholds.md](wiring-thresholds.md).
"""

_ALARMS_HEAD = """\
# Alarms

`python -m normscope.monitor.alarms > docs/alarms.md` writes this page from the alarms' records;
`normscope explain CODE` prints one section. Alarms are findings about a run that goes on. Each is raised
once, and armed again after it was judged normal 20 times in a row: 20 rows for spikes, 200 steps or more for
slow alarms.

A value that is NaN or infinite is looked for before anything else, and enters no median. Spikes are kept out
of the window that they are compared with, so a second spike is seen as well as the first.

Thresholds come from the sources that each section names. These were changed after false alarms:

- Weights grow with the sum of the learning rates, not with steps (NS807).
- A gradient must jump twice in five values, or tenfold (NS805).
- An update must do the same (NS806).
- A weight norm counts from the median of all weight norms on (NS807).
- A loss must rise by six standard errors of its level (NS815).
- A gradient is compared with its last 10 values: 64 lag behind one that grows as attention awakes, and hide a
  jump of one that falls (NS805; a healthy run, and a spike that was seen too late).
- A branch that grows counts from the size of the stream on; a smaller one begins to learn (NS807).
- One gradient that jumps less than 100 times and does not return is a note (NS805).
- A largest logit that grows counts from 50 on, and no more on its way past 100 within 200 steps (NS807).
- A loss under the unigram entropy has learnt context, however slowly it falls (NS809).

NS817 was added after a run that failed late without an alarm
([how it was tested](monitor.md#runs-that-go-wrong-late)).

Twenty synthetic healthy runs of 2,000 steps (`tests/monitor/healthy_runs.py`) raise no alarm:
`pytest tests/monitor/test_alarms_laws.py -k healthy`. [Real ones](monitor.md#healthy-runs) are trained by
hand.
"""


def explain(code_or_name: str) -> str:
    """Full explanation of one finding, as Markdown.

    Args:
        code_or_name: "NS202" or "tokens-collapse", in any case.

    Raises:
        UsageError: no such finding; the message names the nearest one.
    """
    return _section(find_record(code_or_name), "#")


def alarms_page() -> str:
    """docs/alarms.md: one section an alarm of the monitor, where `normscope.monitor.alarms` is imported."""
    rows = "\n".join(f"| [{r.code}](#{_anchor(r)}) | {r.name} | {r.summary} |" for r in ALARMS.values())
    sections = "\n".join(_section(r, "##") for r in ALARMS.values())
    return f"{_ALARMS_HEAD}\n| code | name | what it says |\n|---|---|---|\n{rows}\n\n{sections}"


def page() -> str:
    """docs/findings.md: one section a finding."""
    rows = "\n".join(map(_row, RULES.values()))
    sections = "\n".join(_section(r, "##") for r in RULES.values())
    return f"{_HEAD}\n| code | name | what it says |\n|---|---|---|\n{rows}\n\n{sections}"


def _row(rule: Record) -> str:
    name = f"{rule.code}-{rule.name}"
    return f"| [{rule.code}](#{_anchor(rule)}) | [{rule.name}](findings/{name}.md) | {rule.summary} |"


def _anchor(rule: Record) -> str:
    return f"{rule.code}-{rule.name}".lower()


def _section(rule: Record, heading: str) -> str:
    parts = [f"**{title}.** {getattr(rule, field)}" for title, field in _PARTS]
    if rule.remedies:
        parts.append(f"**Tried by `check --try-remedies`.** {', '.join(rule.remedies)}.")
    body = "\n\n".join(parts)
    return f"{heading} {rule.code} {rule.name}\n\n{body}\n"
