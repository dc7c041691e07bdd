"""Recording of code that is not ours: its forwards, the losses of their outputs, its optimizers."""
