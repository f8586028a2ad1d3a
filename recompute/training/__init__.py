"""Training: losses, optimizers, learning-rate schedules, mixed precision, Fleet, state and data."""
