"""The language of patterns, and their search: graphs of blocks, patterns, rewriting."""
