"""ONNX in: a model file becomes a program."""
