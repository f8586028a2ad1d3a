"""Fine-tuning: edits of the ONNX model before it is trained (new heads, LoRA, weights in 8 bits), and their figures."""

from .int8 import quantize_frozen
from .lora import lora
from .masters import dequantize, requantize
from .merge import merge_adapters
from .onnx_adapter import save_onnx_adapter
from .peft import load_adapter, save_adapter
from .savings import Training, TrainingSaved, savings, training

__all__ = [
    "Training",
    "TrainingSaved",
    "dequantize",
    "load_adapter",
    "lora",
    "merge_adapters",
    "quantize_frozen",
    "requantize",
    "save_adapter",
    "save_onnx_adapter",
    "savings",
    "training",
]
