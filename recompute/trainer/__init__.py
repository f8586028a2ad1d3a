"""Training: the loop around a compiled step, with epochs, evaluation, checkpoints and a log."""
