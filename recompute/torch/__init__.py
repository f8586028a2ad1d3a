"""PyTorch modules as programs, compared with the module, and written back after training."""
