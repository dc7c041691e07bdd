"""Write the page of each finding, in English and Chinese, docs/findings.zh.md and docs/alarms.zh.md.

    PYTHONPATH=. python docs/findings/pages.py

English texts are those of the rules (src/normscope/rules), Chinese ones those of zh.toml and zh-alarms.toml.
"""

import tomllib
from pathlib import Path

from cases import CASES

from normscope.monitor.alarms import ALARMS
from normscope.rules import RULES, Rule

FOLDER = Path(__file__).parent
CHINESE = tomllib.loads((FOLDER / "zh.toml").read_text(encoding="utf-8"))
CHINESE_ALARMS = tomllib.loads((FOLDER / "zh-alarms.toml").read_text(encoding="utf-8"))
PARTS = {"含义": "summary", "为什么重要": "why", "阈值": "threshold", "来源": "source", "怎么办": "remedy"}

ENGLISH_PAGE = """\
# {code} {name}

{summary}

![{code}: {healthy} beside {broken}](../images/findings/{code}.svg)

Blue: {healthy} (healthy). Orange: {broken} (gets the finding). Width 64, byte-level text, seed 0, CPU.

## What to do

{remedy}{tried}

## Why it matters

{why}

## Threshold

{threshold}

## Source

{source}

`normscope explain {code}` prints this page; [all findings](../findings.md).
"""
CHINESE_PAGE = """\
# {code} {name}

{summary}

![{code}：{healthy}与{broken}的对比](../images/findings/{code}.svg)

蓝色：{healthy}（健康）。橙色：{broken}（触发此诊断）。模型宽度 64，字节级文本，随机种子 0，CPU。

## 怎么办

{remedy}{tried}

## 为什么重要

{why}

## 阈值

{threshold}

## 来源

{source}

`normscope explain {code}` 打印英文说明；[全部诊断结果](../findings.zh.md)。
"""
CHINESE_INDEX = """\
# 诊断结果

严重程度：*错误*（error）使结论为“会失败”（will fail），*警告*（warning）为“有风险”（at risk），
*提示*（note）不影响“健康”（healthy）。
若无法试训（没有损失，或 `--steps 0`），结论不是“健康”而是“未试训”（no trial）；
用 Ctrl-C 中断检查时为“已中断”（interrupted）。
仅凭结构最多为警告。关于半精度的诊断结果只是提示，除非模型或 `--dtype` 使用该精度，或者数值在该精度下会溢出。
阈值所依据的测量见 [thresholds.md](thresholds.md)（英文），NS701 到 NS713 的见
[wiring-thresholds.md](wiring-thresholds.md)（英文）。
训练过程中的报警（NS8xx）见 [alarms.zh.md](alarms.zh.md)。

| 代码 | 名称 | 含义 |
|---|---|---|
{rows}
"""
CHINESE_ALARMS_PAGE = """\
# 报警

报警是关于正在进行的训练的诊断结果，由 `normscope.Monitor` 和 `normscope watch -- COMMAND` 报出
（[英文](monitor.md)）。每个报警只报一次；连续 20 次判断正常之后才会再报：
尖峰为 20 行，缓慢变化的报警为 200 步以上。
NaN 和无穷大先于其他一切检查，并且不进入任何中位数。尖峰不进入与之比较的窗口，
因此第二个尖峰与第一个一样会被看到。

`normscope explain CODE` 打印英文说明；[英文页](alarms.md)列出全部报警。
`normscope check run.db` 报告一次已经结束或中断的训练。

| 代码 | 名称 | 含义 |
|---|---|---|
{rows}

{sections}"""


def stem(rule: Rule) -> str:
    """Name of a finding's page, without ending."""
    return f"{rule.code}-{rule.name}"


def english(rule: Rule) -> str:
    """The English page."""
    case, tried = CASES[rule.code], ""
    if rule.remedies:
        tried = f"\n\n`normscope check MODEL --try-remedies` tries on copies: {', '.join(rule.remedies)}."
    texts = {
        field: getattr(rule, field)
        for field in ("code", "name", "summary", "remedy", "why", "threshold", "source")
    }
    return ENGLISH_PAGE.format(healthy=case.healthy, broken=case.broken, tried=tried, **texts)


def chinese(rule: Rule) -> str:
    """The Chinese page."""
    tried = (
        f"\n\n`normscope check MODEL --try-remedies` 会在副本上尝试：{'、'.join(rule.remedies)}。"
        if rule.remedies
        else ""
    )
    return CHINESE_PAGE.format(code=rule.code, name=rule.name, tried=tried, **CHINESE[rule.code])


def pages() -> dict[Path, str]:
    """Path → content of every page."""
    found = {}
    for rule in RULES.values():
        found[FOLDER / f"{stem(rule)}.md"] = english(rule)
        found[FOLDER / f"{stem(rule)}.zh.md"] = chinese(rule)
    rows = [
        f"| [{rule.code}](findings/{stem(rule)}.zh.md) | {rule.name} | {CHINESE[rule.code]['summary']} |"
        for rule in RULES.values()
    ]
    found[FOLDER.parent / "findings.zh.md"] = CHINESE_INDEX.format(rows="\n".join(rows))
    found[FOLDER.parent / "alarms.zh.md"] = chinese_alarms()
    return found


def chinese_alarms() -> str:
    """The Chinese page of the alarms that have Chinese texts."""
    rows, sections = [], []
    for code, texts in CHINESE_ALARMS.items():
        name = ALARMS[code].name
        rows.append(f"| [{code}](#{code.lower()}-{name}) | {name} | {texts['summary']} |")
        body = "\n\n".join(f"**{title}。** {texts[field]}" for title, field in PARTS.items())
        sections.append(f"## {code} {name}\n\n{body}\n")
    return CHINESE_ALARMS_PAGE.format(rows="\n".join(rows), sections="\n".join(sections))


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
