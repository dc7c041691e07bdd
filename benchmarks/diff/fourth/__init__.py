"""The sets `fourth` and `same-fourth`: models in the styles of public code, with reported mistakes."""
