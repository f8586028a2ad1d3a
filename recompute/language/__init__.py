"""The language: types, operators, blocks, their text, and the verifier."""
