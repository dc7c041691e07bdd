"""`python -m normscope.rules`: print docs/findings.md."""

from normscope.rules.explain import page

print(page(), end="")
