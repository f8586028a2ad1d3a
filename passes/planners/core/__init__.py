"""Parts shared by planners: the problem, its simulation, bounds, and common algorithms."""
