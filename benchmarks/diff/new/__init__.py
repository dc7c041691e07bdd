"""The sets `new` and `same-new`: models whose parts are written in many code styles."""
