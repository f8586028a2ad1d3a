"""Reports, pictures and traces of a compiled step."""
