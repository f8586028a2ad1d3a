"""What any part may use: files that are written whole, caches, locks, tables for people."""
