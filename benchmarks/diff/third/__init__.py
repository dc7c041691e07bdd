"""The sets `third` and `same-third`: models in the styles of public code."""
