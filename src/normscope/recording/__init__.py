"""Recording of code that is not ours: the forwards that it runs, the losses of their outputs, its optimizers."""
