"""Losses, optimizers, schedules of learning rates, mixed precision, Fleet's strategies, state and data."""
