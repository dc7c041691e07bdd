"""Published predictors of training failures, each as its source says, beside normscope's forecast.

One file is one predictor: a function of a `Setting` (a model, its batches, a recipe, and learning rates)
that returns scores, larger where a failure is more likely, and its cost. `catalogue` lists them, `cells`
reads truth files, `scoring` compares, `divergence` is the grid of norm-free and normed models, `risk` fits
the forecast's risk of divergence on a part of it, and

    python -m benchmarks.predictors FILE

computes the scores of every ladder in a truth file and prints the table.
"""
