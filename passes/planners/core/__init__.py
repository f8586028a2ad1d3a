"""What planners share: the problem, its judge, bounds, and parts of methods."""
