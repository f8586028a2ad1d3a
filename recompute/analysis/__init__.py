"""What a step takes and what it is worth, before and after it runs."""
