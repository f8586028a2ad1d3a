"""The on-device training interface of ONNX Runtime, whose wheels ended with 1.19: `artifacts` and `api`.

`from onnxruntime.training import artifacts` becomes `from recompute.compat.onnxruntime_training import artifacts`, and
`onnxruntime.training.api` becomes `recompute.compat.onnxruntime_training.api` (docs/onnxruntime.md).
"""
