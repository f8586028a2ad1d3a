"""oneDNN primitives of products: convolutions in all types, matrix products in bfloat16."""
