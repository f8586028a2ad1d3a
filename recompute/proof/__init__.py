"""Proofs that a compiled step computes what the step before its passes computes."""
