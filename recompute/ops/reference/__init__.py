"""ONNX nodes that ONNX's own evaluator runs, and ONNX's Gradient."""
