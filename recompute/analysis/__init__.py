"""Analysis of a step before and after it runs: estimates, biggest batch, comparisons, checks, operator times."""
