"""FCOS, an anchor-free detector on a feature pyramid (Tian et al. 2019, arXiv 1904.01355), with its loss inside.

As in the paper's improved form: centerness beside the regression, generalised IoU (Rezatofighi et al. 2019, arXiv
1902.09630), targets in units of the level's stride. The backbone has torchvision's names and layouts of a ResNet, so
that the weights of a classifier can be copied in by name; heads and pyramid have those of torchvision's FCOS without
their first parts (`backbone.`, `head.`). `examples/detecting` makes the targets from boxes, and boxes from the outputs.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import UsageError
from .common import BATCH, ONES, ZEROS, Init, InputSpec, Net, integers
from .registry import Family, Variant, register
from .resnet import trunk

#: what a location's probability of an object is at the start (Lin et al. 2017, arXiv 1708.02002, 4.1)
_PRIOR = 0.01
_NORMAL = Init("normal", 0.01)
#: focal loss: exponent (as a square below) and weight of objects
_ALPHA = 0.25


def _variant(name: str, description: str, batches: tuple[int, int], **options: object) -> Variant:
    return Variant(f"fcos-{name}", description, *batches, options)


@register(
    _variant(
        "tiny", "FCOS on a ResNet of 10 layers for small images", (8, 64),
        blocks=(1, 1, 1, 1), bottleneck=False, width=16, image=(64, 64), classes=3,
        channels=32, depth=1, groups=4, coarse=False,
    ),
    _variant("resnet50", "FCOS on ResNet-50 for COCO", (1, 8)),
)  # fmt: skip
@dataclass(frozen=True)
class Fcos(Family):
    """x float32 [N, 3, height, width] and the targets of L locations to loss float32 [].

    Targets: `target_classes` int64 [N, L] (-1: no object), `target_distances` float32 [N, 4, L] (to the left, top,
    right and bottom side of the box, in strides; 1 where there is none) and `target_centerness` float32 [N, L] (0 where
    there is none). For inference there are `scores` [N, classes, L] and `centerness` [N, L] before their sigmoids, and
    `distances` [N, 4, L]. Locations are those of a third to fifth level, at 1/8, 1/16 and 1/32 of the size, and with
    `coarse` of two more, row by row.

    `blocks` and `width` are a ResNet's, `channels` those of the pyramid and of the heads, `depth` the convolutions of a
    head, `groups` those of its norms.
    """

    task: ClassVar[str] = "detection"
    output: ClassVar[str] = "loss"

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    image: tuple[int, ...] = (800, 1216)
    classes: int = 80
    channels: int = 256
    depth: int = 4
    groups: int = 32
    coarse: bool = True

    def __post_init__(self) -> None:
        if len(self.blocks) != 4 or min(self.blocks) < 1:
            raise UsageError(f"option 'blocks' must be four sizes of at least 1, not {self.blocks}")
        if any(side % 32 for side in self.image):
            height, width = self.image
            raise UsageError(f"option 'image' must be multiples of 32 (five strides halve them), not {height}x{width}")
        if self.channels % self.groups:
            raise UsageError(f"option 'groups' must divide the {self.channels} channels, not be {self.groups}")

    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each level."""
        strides = [8, 16, 32, *([64, 128] if self.coarse else [])]
        return [(-(-self.image[0] // s), -(-self.image[1] // s)) for s in strides]

    def inputs(self) -> tuple[InputSpec, ...]:
        count = sum(h * w for h, w in self.sizes())
        return (
            InputSpec("x", "float32", (BATCH, 3, *self.image)),
            integers("target_classes", (BATCH, count), low=-1, high=self.classes),
            InputSpec("target_distances", "float32", (BATCH, 4, count), 0.5, 4.0),
            InputSpec("target_centerness", "float32", (BATCH, count), 0.0, 1.0),
        )

    def label(self) -> None:
        return None

    def checkpoints(self) -> tuple[str, ...]:
        stages = enumerate(self.blocks, start=1)
        blocks = [f"layer{stage}.{index}.out" for stage, count in stages for index in range(count)]
        # behind "scores" only the loss comes: the heads of one level at a time are computed again
        return (*blocks, "p3", "scores")

    def build(self, net: Net) -> None:
        stages = trunk(net, self.blocks, bottlenecks=self.bottleneck, width=self.width)
        levels = self._pyramid(net, stages[1:])
        each = {"scores": self.classes, "distances": 4, "centerness": 1}
        parts: dict[str, list[str]] = {name: [] for name in each}
        for name, number in (("ones", 1.0), ("zeros", 0.0)):
            # computed from a scalar: a constant of this shape would be taken for a weight of the norm, and trained
            scalar, count = net.constant(f"groups.{name}.scalar", number), net.constant("groups", [self.groups])
            net.add("Expand", [scalar, count], f"groups.{name}")
        for index, (x, (h, w)) in enumerate(zip(levels, self.sizes(), strict=True)):
            for name, value in self._heads(net, index, x).items():
                shape = net.constant(f"{name}.rows{index + 3}.shape", [0, each[name], h * w])
                parts[name].append(net.add("Reshape", [value, shape], f"p{index + 3}.{name}.rows"))
        for name, values in parts.items():
            net.add("Concat", values, name if name != "centerness" else "centerness.rows", axis=2)
        net.add("Squeeze", ["centerness.rows", net.constant("channel", [1])], "centerness")
        _loss(net, self.classes)
        net.output("loss", ())

    def _pyramid(self, net: Net, stages: list[tuple[str, int]]) -> list[str]:
        """From the coarsest stage down: each level adds the doubled one above it."""
        levels: list[str] = []
        above = ""
        for index in reversed(range(len(stages))):
            x, size = stages[index]
            name = f"fpn.{index + 3}"
            init = _pyramid_start(size)
            x = _conv(net, x, f"{name}.inner", f"fpn.inner_blocks.{index}.0", (size, self.channels), 1, init)
            if above:
                x = net.add("Add", [x, _doubled(net, above, f"{name}.above")], f"{name}.sum")
            above = x
            init = _pyramid_start(9 * self.channels)
            both = (self.channels, self.channels)
            levels.insert(0, _conv(net, x, f"p{index + 3}", f"fpn.layer_blocks.{index}.0", both, 3, init))
        if self.coarse:
            init = _pyramid_start(9 * self.channels)
            for name in ("p6", "p7"):
                x = levels[-1] if name == "p6" else net.add("Relu", ["p6"], "p6.relu")
                levels.append(_conv(net, x, name, f"fpn.extra_blocks.{name}", both, 3, init, stride=2))
        return levels

    def _heads(self, net: Net, level: int, feature: str) -> dict[str, str]:
        """Scores, distances and centerness of a level; the parameters are those of all levels but for a factor."""
        towers, name = {}, f"p{level + 3}"
        for head in ("classification", "regression"):
            x = feature
            for index in range(self.depth):
                values, params = f"{name}.{head}{index}", f"{head}_head.conv"
                both = (self.channels, self.channels)
                x = _conv(net, x, f"{values}.conv", f"{params}.{3 * index}", both, 3, _NORMAL)
                x = self._norm(net, x, f"{values}.norm", f"{params}.{3 * index + 1}", level)
                x = net.add("Relu", [x], f"{values}.relu")
            towers[head] = x
        x, y, size = towers["classification"], towers["regression"], self.channels
        prior = Init("constant", -math.log((1 - _PRIOR) / _PRIOR))
        scores = _conv(
            net, x, f"{name}.scores", "classification_head.cls_logits", (size, self.classes), 3, _NORMAL, prior
        )
        sides = _conv(net, y, f"{name}.sides", "regression_head.bbox_reg", (size, 4), 3, _NORMAL)
        sides = net.add("Mul", [sides, net.parameter(f"scales.{name}", (1,), ONES)], f"{name}.sides.scaled")
        centerness = _conv(net, y, f"{name}.centerness", "regression_head.bbox_ctrness", (size, 1), 3, _NORMAL)
        return {
            "scores": scores, "distances": net.add("Exp", [sides], f"{name}.distances"), "centerness": centerness,
        }  # fmt: skip

    def _norm(self, net: Net, x: str, name: str, params: str, level: int) -> str:
        """Group normalisation (Wu and He 2018), which this opset has only by parts."""
        x = net.add("Reshape", [x, net.constant("groups.shape", [0, self.groups, -1])], f"{name}.groups")
        x = net.add("InstanceNormalization", [x, "groups.ones", "groups.zeros"], f"{name}.plain", epsilon=1e-5)
        image = net.constant(f"image{level + 3}.shape", [0, self.channels, *self.sizes()[level]])
        x = net.add("Reshape", [x, image], f"{name}.image")
        column = net.constant("column", [self.channels, 1, 1])
        weight, bias = (
            net.add("Reshape", [net.shared(f"{params}.{key}", (self.channels,), init), column], f"{name}.{key}")
            for key, init in (("weight", ONES), ("bias", ZEROS))
        )
        return net.add("Add", [net.add("Mul", [x, weight], f"{name}.scaled"), bias], name)


def _pyramid_start(fan_in: int) -> Init:
    """torchvision's for a pyramid: He et al.'s uniform law for a layer that no ReLU follows."""
    return Init("uniform", math.sqrt(3.0 / fan_in))


def _conv(
    net: Net,
    x: str,
    name: str,
    params: str,
    channels: tuple[int, int],
    kernel: int,
    init: Init,
    bias: Init = ZEROS,
    stride: int = 1,
) -> str:
    """A padded convolution, `channels` being (in, out), whose parameters other levels may have too."""
    weight = net.shared(f"{params}.weight", (channels[1], channels[0], kernel, kernel), init)
    inputs = [x, weight, net.shared(f"{params}.bias", channels[1:], bias)]
    window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
    return net.add("Conv", inputs, name, **window)


def _doubled(net: Net, x: str, name: str) -> str:
    """x [N, C, H, W] with each pixel twice in both directions."""
    scales = net.constant("doubled", np.array([1.0, 1.0, 2.0, 2.0]))
    modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return net.add("Resize", [x, "", scales], name, **modes)


def _loss(net: Net, classes: int) -> None:
    """Focal loss of all locations, and generalised IoU and centerness of those inside a box, by the number of these.

    As in the paper, the IoU is weighted by the centerness wanted.
    """
    minus, one = net.constant("none", np.array(-1)), net.constant("one", 1.0)
    front = net.add("Cast", [net.add("Greater", ["target_classes", minus], "front.mask")], "front", to=1)
    count = net.add("Max", [net.add("ReduceSum", [front], "front.count", keepdims=0), one], "count")
    focal = net.add("ReduceSum", [_focal(net, classes)], "focal.sum", keepdims=0)
    # log(1 + e^x) - x * wanted, stable for scores of both signs
    soft = net.add("Softplus", ["centerness"], "middle.soft")
    product = net.add("Mul", ["centerness", "target_centerness"], "middle.own")
    middle = net.add("Mul", [net.add("Sub", [soft, product], "middle.each"), front], "middle.front")
    middle = net.add("ReduceSum", [middle], "middle.sum", keepdims=0)
    scores = net.add("Div", [net.add("Add", [focal, middle], "scores.sum"), count], "scores.mean")
    weighted = net.add("Mul", [_apart(net, one), "target_centerness"], "boxes.each")
    boxes = net.add("ReduceSum", [weighted], "boxes.sum", keepdims=0)
    weight = net.add("ReduceSum", ["target_centerness"], "boxes.weight", keepdims=0)
    weight = net.add("Max", [weight, net.constant("least", 1e-6)], "boxes.least")
    net.add("Add", [scores, net.add("Div", [boxes, weight], "boxes.mean")], "loss")


def _focal(net: Net, classes: int) -> str:
    """alpha·(1 - p)²·-log p for each location and class [N, classes, L], p being what the right answer was given.

    With z = -x where the class is right, else x: 1 - p = sigmoid(z) and -log p = log(1 + e^z).
    """
    numbers = net.constant("classes", np.arange(classes)[:, None])
    wanted = net.add("Unsqueeze", ["target_classes", net.constant("channel", [1])], "wanted.classes")
    right = net.add("Equal", [wanted, numbers], "right")
    z = net.add("Where", [right, net.add("Neg", ["scores"], "scores.minus"), "scores"], "focal.wrong")
    alpha = net.constant("alpha", _ALPHA), net.constant("alpha.other", 1 - _ALPHA)
    weight = net.add("Where", [right, *alpha], "focal.alpha")
    wrong = net.add("Sigmoid", [z], "focal.share")
    factor = net.add("Mul", [weight, net.add("Mul", [wrong, wrong], "focal.square")], "focal.factor")
    return net.add("Mul", [factor, net.add("Softplus", [z], "focal.log")], "focal.each")


def _apart(net: Net, one: str) -> str:
    """1 - the generalised IoU of the boxes around each location [N, L], from their distances to the four sides."""
    names = {}
    for of, value in (("found", "distances"), ("wanted", "target_distances")):
        sides = [f"{of}.{side}" for side in ("left", "top", "right", "bottom")]
        names[of] = net.add_many(
            "Split", [value], [f"{s}.channel" for s in sides], name=f"{of}.sides", axis=1, num_outputs=4
        )

    def area(name: str, sides: list[str]) -> str:
        width, height = (net.add("Add", sides[i::2], f"{name}.{s}") for i, s in enumerate(("width", "height")))
        return net.add("Mul", [width, height], f"{name}.area")

    pairs = list(zip(names["found"], names["wanted"], strict=True))
    inner, outer = (
        area(name, [net.add(op, pair, f"{name}.{i}") for i, pair in enumerate(pairs)])
        for name, op in (("inner", "Min"), ("outer", "Max"))
    )
    both = net.add("Add", [area("found", names["found"]), area("wanted", names["wanted"])], "both")
    union = net.add("Sub", [both, inner], "union")
    overlap = net.add("Div", [inner, union], "overlap")
    filled = net.add("Div", [union, outer], "filled")
    # 1 - (inner / union - (outer - union) / outer) = 2 - inner / union - union / outer
    apart = net.add("Sub", [net.constant("two", 2.0), net.add("Add", [overlap, filled], "giou.next")], "apart.channel")
    return net.add("Squeeze", [apart, net.constant("channel", [1])], "apart")
