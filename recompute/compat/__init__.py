"""Interfaces of other libraries, so that programs written for them run here with other imports."""
