"""Networks whose losses index by boolean masks: detectors with torchvision's losses, classifiers of marked sentences.

Matching of predictions with targets is done beforehand, as data loaders do it; which of them count is data.
"""

from __future__ import annotations

from typing import Any

import torch
from architectures import _SMALL, _WORDS, ARCHITECTURES, _words
from torch import nn
from torch.nn import functional

_CLASSES, _QUERIES = 5, 7


def _boxes(*shape: int) -> Any:
    """Boxes (x1, y1, x2, y2) in a picture of 32 by 32."""
    first, size = torch.rand(*shape, 2) * 16, torch.rand(*shape, 2) * 12 + 2
    return torch.cat([first, first + size], -1)


class Detr(nn.Module):
    """A backbone, a transformer with queries; cross entropy, L1 and generalised IoU of the pairs that count."""

    def __init__(self, pairwise: bool) -> None:
        super().__init__()
        self.pairwise = pairwise
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 2, 2))
        self.place = nn.Parameter(torch.randn(16, 16) * 0.1)
        self.queries = nn.Parameter(torch.randn(_QUERIES, 16))
        self.transformer = nn.Transformer(16, 2, 1, 1, 24, 0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(16, _CLASSES + 1), nn.Linear(16, 4)

    def forward(self, x: Any, labels: Any, boxes: Any) -> Any:
        from torchvision import ops

        memory = self.backbone(x).flatten(2).transpose(1, 2) + self.place
        found = self.transformer(memory, self.queries.expand(len(x), -1, -1))
        scores, places = self.classes(found), self.boxes(found).sigmoid()
        pair = labels < _CLASSES
        mine, theirs = places[pair], boxes[pair]
        corners = ops.box_convert(mine, "cxcywh", "xyxy"), ops.box_convert(theirs, "cxcywh", "xyxy")
        if self.pairwise:
            overlap = (1 - torch.diagonal(ops.generalized_box_iou(*corners))).sum()
        else:
            overlap = ops.generalized_box_iou_loss(*corners, reduction="sum")
        count = pair.sum().clamp(min=1)
        apart = functional.l1_loss(mine, theirs, reduction="sum") / count
        weights = torch.ones(_CLASSES + 1, dtype=scores.dtype)
        weights[-1] = 0.1
        named = functional.cross_entropy(scores.transpose(1, 2), labels, weights)
        return {"loss": named + 5 * apart + 2 * overlap / count, "scores": scores}


def _detr(pairwise: bool) -> Any:
    labels = torch.randint(0, _CLASSES, (2, _QUERIES))
    labels[torch.rand(2, _QUERIES) < 0.5] = _CLASSES
    centres = torch.rand(2, _QUERIES, 4) * 0.4 + 0.3
    return Detr(pairwise), {"x": torch.randn(2, 3, 32, 32), "labels": labels, "boxes": centres}, None


class Retina(nn.Module):
    """torchvision's heads of RetinaNet with their own losses.

    `matched`: each anchor's box, -1 for background, -2 for what is ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.detection.retinanet import RetinaNetHead

        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU())
        self.head = RetinaNetHead(8, 2, _CLASSES)
        self.head.regression_head._loss_type = "giou"  # TorchScript cannot export L1, dynamo not the class targets
        for p in self.head.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.2)

    def forward(self, x: Any, matched: Any, labels: Any, boxes: Any, anchors: Any) -> Any:
        out = self.head([self.backbone(x)])
        targets = [{"labels": labels[i], "boxes": boxes[i]} for i in range(len(x))]
        found = self.head.compute_loss(targets, out, [anchors] * len(x), list(matched.unbind(0)))
        return {"loss": found["classification"] + found["bbox_regression"], **out}


def _retina() -> Any:
    inputs = {
        "x": torch.randn(2, 3, 32, 32), "matched": torch.randint(-2, 3, (2, 128)),
        "labels": torch.randint(0, _CLASSES, (2, 3)), "boxes": _boxes(2, 3), "anchors": _boxes(128),
    }  # fmt: skip
    return Retina(), inputs, None


class Fcos(nn.Module):
    """Focal loss on all places; generalised IoU and centredness on the foreground."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.GroupNorm(2, 8), nn.ReLU())
        self.scores, self.sides, self.centred = (nn.Conv2d(8, n, 3, 1, 1) for n in (_CLASSES, 4, 1))

    def forward(self, x: Any, labels: Any, sides: Any) -> Any:
        from torchvision import ops

        h = self.tower(x)
        scores, found, centred = (f(h).flatten(2).transpose(1, 2) for f in (self.scores, self.sides, self.centred))
        found = found.exp()
        foreground, count = labels > 0, (labels > 0).sum().clamp(min=1)
        classes = functional.one_hot(labels, _CLASSES + 1)[..., 1:].to(scores.dtype)
        focal = ops.sigmoid_focal_loss(scores, classes, reduction="sum") / count
        mine, theirs = found[foreground], sides[foreground]
        boxes = [torch.cat([-s[:, :2], s[:, 2:]], -1) for s in (mine, theirs)]
        overlap = ops.generalized_box_iou_loss(*boxes, reduction="sum") / count
        pairs = theirs[:, 0::2], theirs[:, 1::2]
        wanted = torch.stack([p.min(-1)[0] / p.max(-1)[0] for p in pairs], -1).prod(-1).sqrt()
        middle = functional.binary_cross_entropy_with_logits(centred[foreground][:, 0], wanted, reduction="mean")
        smooth = functional.smooth_l1_loss(mine.log(), theirs.log(), reduction="sum", beta=0.5) / count
        return {"loss": focal + overlap + middle + smooth, "scores": scores}


def _fcos() -> Any:
    labels = torch.randint(0, _CLASSES + 1, (2, 64)) * (torch.rand(2, 64) < 0.4)
    sides = torch.where((labels > 0).unsqueeze(-1), torch.rand(2, 64, 4) * 5 + 1, torch.zeros(()))
    return Fcos(), {"x": torch.randn(2, 3, 32, 32), "labels": labels, "sides": sides}, None


class Proposals(nn.Module):
    """Second stage as in Faster R-CNN: smooth L1 on the boxes of each proposal's class, background left out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.scores, self.boxes = nn.Linear(16, _CLASSES), nn.Linear(16, 4 * _CLASSES)

    def forward(self, x: Any, labels: Any, boxes: Any) -> Any:
        from torchvision.models.detection.roi_heads import fastrcnn_loss

        h = self.body(x)
        named, placed = fastrcnn_loss(self.scores(h), self.boxes(h), [labels], [boxes])
        return {"loss": named + placed}


def _proposals() -> Any:
    inputs = {"x": torch.randn(30, 12), "labels": torch.randint(0, _CLASSES, (30,)), "boxes": torch.randn(30, 4)}
    return Proposals(), inputs, None


def _sentences(family: str, **options: Any) -> Any:
    """Classifiers of sentences of which some have no label (-1)."""

    def make() -> Any:
        import transformers as hf

        config = getattr(hf, f"{family}Config")(num_labels=4, **{**_SMALL, **options})
        module = getattr(hf, f"{family}ForSequenceClassification")(config)
        return module, {"input_ids": _words(4), "labels": torch.tensor([2, -1, 0, 3])}, None

    return make


class MaskedWords(nn.Module):
    """Masked words the way many scripts train them: only hidden states of masked places go through the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(_WORDS, 16)
        self.body = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: Any, labels: Any) -> Any:
        h, masked = self.body(self.table(ids)), labels != -100
        scores = self.norm(functional.gelu(h[masked])) @ self.table.weight.T
        return {"loss": functional.cross_entropy(scores, labels[masked])}


def _masked_words() -> Any:
    ids, labels = _words(3), _words(3)
    labels[torch.rand(labels.shape) < 0.7] = -100
    return MaskedWords(), {"ids": ids, "labels": labels}, None


class Longformer(nn.Module):
    """Words that see all others at fixed places: how many there are would have to be known, were they an input."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as hf

        config = hf.LongformerConfig(**{**_SMALL, "max_position_embeddings": 40}, attention_window=4, pad_token_id=1)
        self.model = hf.LongformerForMaskedLM(config)
        seen = torch.zeros(2, 12, dtype=torch.int64)
        seen[0, [0, 5]] = 1
        seen[1, 0] = 1
        self.register_buffer("seen", seen)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return {"loss": self.model(input_ids=input_ids, global_attention_mask=self.seen, labels=labels)["loss"]}


def _longformer() -> Any:
    ids = torch.randint(3, _WORDS, (2, 12))
    return Longformer(), {"input_ids": ids, "labels": ids}, None


ARCHITECTURES |= {
    "masked/detr_giou_loss": lambda: _detr(False),
    "masked/detr_pairwise_giou": lambda: _detr(True),
    "masked/retinanet": _retina,
    "masked/fcos": _fcos,
    "masked/fast_rcnn": _proposals,
    "masked/words": _masked_words,
    "masked/DebertaForSequenceClassification": _sentences("Deberta"),
    "masked/DebertaV2ForSequenceClassification": _sentences("DebertaV2"),
    "masked/Deberta_relative": _sentences("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "masked/DebertaV2_relative": _sentences("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "masked/Longformer": _longformer,
}
