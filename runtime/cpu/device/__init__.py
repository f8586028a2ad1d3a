"""How the processor is reached: machine code in memory, its cache, oneDNN's C functions."""
