"""ONNX out: training steps and trained models as files."""
