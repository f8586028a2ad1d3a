"""ONNX import: from a model file to a program."""
