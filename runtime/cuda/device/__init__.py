"""How a CUDA device is reached: memory, launches, NVRTC, cuBLAS; and the device that is emulated."""
