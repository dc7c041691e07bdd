"""Capture of a training script as it is: its model, batches, loss and optimizer, and its real steps."""
