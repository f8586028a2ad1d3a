"""CPU access: machine code in memory, its cache, oneDNN's C functions."""
