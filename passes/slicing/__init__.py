"""Parts of a step that run in slices, so that only one slice of what is inside them exists at a time."""
