"""Pipelines: stages of the step on different ranks, and the order in which each runs its micro-batches."""
