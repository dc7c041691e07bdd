"""The sets `fresh` and `same-fresh`: published models, ports, refactorings and training recipes."""
