"""Values rounded to 8 bits, for training models that will run in integers."""
