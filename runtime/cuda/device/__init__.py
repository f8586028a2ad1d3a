"""CUDA device access: memory, launches, NVRTC, cuBLAS; and the emulated device."""
