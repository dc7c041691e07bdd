"""`python -m normscope.monitor.alarms`: print docs/alarms.md."""

from normscope.rules.pages import alarms_page

print(alarms_page(), end="")
