"""Plans inside of PyTorch: AOTAutograd's joint graph as a problem, its partition by a plan, a backend and a policy."""
