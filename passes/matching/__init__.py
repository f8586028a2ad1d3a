"""What patterns are written in, and what finds them: graphs of blocks, patterns, rewriting."""
