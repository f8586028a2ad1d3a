"""ONNX export of training steps and trained models."""
