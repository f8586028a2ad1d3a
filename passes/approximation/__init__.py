<<<<<<< HEAD
"""Approximations that a user permits: sketches, few-bit slopes and compressed values in place of what waits."""
=======
"""Less memory by permission: rewrites of a training step that approximate what its backward pass reads."""
>>>>>>> a49d567b57c5853851898ddbde9b2e79fbd480af
