"""Planted differences of models, and how often `normscope diff` finds them.

`runs` compares the pairs of a set, and `judging` judges what is found. The first sets are `seen` and
`held_out`, with `starts` and `recipes` for both; `refactorings` has their pairs without a difference, and
`ports` their models. Each later set is a package: `different` has its pairs with planted differences, `same`
its pairs without, and `check` verifies the truth without `normscope diff`.
"""
