"""`python -m normscope.rules`: print docs/findings.md."""

from normscope.rules.pages import page

print(page(), end="")
