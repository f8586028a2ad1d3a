"""Memory: liveness, shared buffers, and addresses."""
