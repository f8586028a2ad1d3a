"""The operations on the edges of searched cells; each begins with a ReLU and ends with a norm, pools have neither."""

from typing import Any

from .common import Init, Net, Size

# Before training has measured any statistics the norms do nothing, and a state adds up two edges: at this start even
# an untrained network of 20 cells stays in range.
_GAIN = Init("constant", 0.7)


class Parts:
    """Adds operations to a network. All keep the size of x [N, C, H, W], or halve it with stride 2."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def edge(self, kind: str, x: str, name: str, width: int, stride: int) -> str:
        """sep, dil with a kernel size; max, avg (3x3); rect7 (1x7, 7x1); skip, which with a stride is `halve`."""
        if kind == "skip":
            return x if stride == 1 else self.halve(x, name, channels=(width, width))
        if kind == "max":
            return self.net.max_pool(x, name, kernel=3, stride=stride, padding=1)
        if kind == "avg":
            return self.net.average_pool(x, name, kernel=3, stride=stride, padding=1)
        if kind == "rect7":
            return self._rect(x, name, width, stride)
        kernel = int(kind[3:])
        if kind.startswith("dil"):
            return self._depthwise(x, name, f"{name}.dil", width, kernel, stride, dilation=2)
        x = self._depthwise(x, f"{name}.1", f"{name}.sep1", width, kernel, stride)
        return self._depthwise(x, name, f"{name}.sep2", width, kernel, 1)

    def project(self, x: str, name: str, *, channels: tuple[int, int]) -> str:
        """A 1x1 convolution to other channels."""
        x = self.net.add("Relu", [x], f"{name}.relu")
        x = self.net.conv(x, f"{name}.conv", channels=channels, kernel=1, bias=False)
        return self._norm(x, name, channels[1])

    def halve(self, x: str, name: str, *, channels: tuple[int, int]) -> str:
        """Half the size: 1x1 convolutions on every second pixel, and on those one further down and right."""
        net, (first, out) = self.net, channels
        x = net.add("Relu", [x], f"{name}.relu")
        parts = [net.conv(x, f"{name}.conv1", channels=(first, out // 2), kernel=1, stride=2, bias=False)]
        bounds = {"starts": [1, 1], "ends": [1 << 31, 1 << 31], "axes": [2, 3]}
        inputs = [net.constant(f"shift.{key}", value) for key, value in bounds.items()]
        y = net.add("Slice", [x, *inputs], f"{name}.shift")
        parts.append(net.conv(y, f"{name}.conv2", channels=(first, out - out // 2), kernel=1, stride=2, bias=False))
        return self._norm(net.concat(parts, f"{name}.cat"), name, out)

    def _norm(self, x: str, name: str, width: int) -> str:
        return self.net.batch_norm(x, name, channels=width, params=f"{name}.bn", init=_GAIN)

    def _depthwise(self, x: str, name: str, inner: str, width: int, kernel: int, stride: int, dilation: int = 1) -> str:
        """A depthwise convolution and a 1x1 one, to the value `name`; `inner` names what is between."""
        net, channels = self.net, (width, width)
        x = net.add("Relu", [x], f"{inner}.relu")
        window: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": kernel // 2 * dilation}
        x = net.conv(x, f"{inner}.depth", channels=channels, groups=width, dilation=dilation, bias=False, **window)
        x = net.conv(x, f"{inner}.point", channels=channels, kernel=1, bias=False)
        return self._norm(x, name, width)

    def _rect(self, x: str, name: str, width: int, stride: int) -> str:
        """1x7 with the stride along the width, then 7x1 with that along the height."""
        x = self.net.add("Relu", [x], f"{name}.relu")
        steps: tuple[tuple[str, Size, Size, Size], ...] = (
            ("wide", (1, 7), (1, stride), (0, 3)),
            ("tall", (7, 1), (stride, 1), (3, 0)),
        )
        for side, kernel, step, padding in steps:
            window: dict[str, Any] = {"kernel": kernel, "stride": step, "padding": padding}
            x = self.net.conv(x, f"{name}.{side}", channels=(width, width), bias=False, **window)
        return self._norm(x, name, width)
