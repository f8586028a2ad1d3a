"""A recogniser of text lines learns by the CTC loss: images of words, whose letters lie anywhere, and the words.

The lines are drawn here, with letters of five by seven points, noise and gaps of any width; what it reads is compared
with lines that it never saw.
"""

import numpy as np
import onnx.parser

import recompute as rc

LETTERS = {
    "a": "0e11111f111111", "c": "0e11101010110e", "e": "1f10101e10101f", "i": "0e04040404040e",
    "l": "1010101010101f", "n": "11191513111111", "o": "0e11111111110e", "r": "1e11111e141211",
    "s": "0f10100e01011e", "t": "1f040404040404",
}  # fmt: skip
GLYPHS = [[[int(c[i : i + 2], 16) >> (4 - j) & 1 for j in range(5)] for i in range(0, 14, 2)] for c in LETTERS.values()]
FONT = np.array(GLYPHS, np.float32)  # [letters, 7, 5]
WIDTH, MOST, BATCH, EPOCHS, SEED = 64, 6, 32, 6, 5

MODEL = f"""<ir_version: 9, opset_import: ["" : 18]>
lines (float[N, 1, 12, {WIDTH}] image) => (float[{WIDTH // 2}, N, {len(FONT) + 1}] scores)
<float[24, 1, 3, 3] w1, float[24] b1, float[48, 24, 3, 3] w2, float[48] b2, float[288, 96] w3, float[96] b3,
 float[96, {len(FONT) + 1}] w4, float[{len(FONT) + 1}] b4> {{
  c1 = Conv <pads = [1, 1, 1, 1]> (image, w1, b1)
  r1 = Relu (c1)
  p1 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r1)
  c2 = Conv <pads = [1, 1, 1, 1]> (p1, w2, b2)
  r2 = Relu (c2)
  columns = Transpose <perm = [3, 0, 1, 2]> (r2)
  flat = Constant <value_ints = [0, 0, -1]> ()
  steps = Reshape (columns, flat)
  m3 = MatMul (steps, w3)
  h3 = Add (m3, b3)
  r3 = Relu (h3)
  m4 = MatMul (r3, w4)
  scores = Add (m4, b4)
}}
"""


def network() -> onnx.ModelProto:
    """Two convolutions over the image, then two layers over its columns: 32 steps."""
    model = onnx.parser.parse_model(MODEL)
    draws = np.random.default_rng(SEED)
    for v in model.graph.value_info:
        shape = [d.dim_value for d in v.type.tensor_type.shape.dim]
        fan = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
        scale = 0 if len(shape) == 1 else np.sqrt(2 / fan)
        array = (scale * draws.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, v.name))
    return model


def lines(count: int, seed: int) -> dict[str, np.ndarray]:
    """Images f32[count, 1, 12, 64] and labels i64[count, 6]: classes from 1 on, ended by -100."""
    draws = np.random.default_rng(seed)
    images = draws.normal(0, 0.2, (count, 1, 12, WIDTH)).astype(np.float32)
    labels = np.full((count, MOST), -100)
    for i in range(count):
        at = draws.integers(1, 6)
        for k in range(draws.integers(2, MOST + 1)):
            if at + 5 > WIDTH:
                break
            letter, top = draws.integers(len(FONT)), draws.integers(1, 5)
            images[i, 0, top : top + 7, at : at + 5] += FONT[letter]
            labels[i, k] = 1 + letter
            at += draws.integers(6, 11)
    return {"image": images, "label": labels}


program = rc.load(network(), batch=BATCH)
loss = rc.losses.ctc(program["scores"], batch_first=False, label_size=MOST)
metric = rc.metrics.CharacterErrorRate(batch_first=False)
trainer = rc.Trainer(program, rc.Adam(2e-3), loss=loss, metrics=[metric], seed=SEED, quiet=True)
unseen = lines(320, 1)
history = trainer.fit(rc.data.dataset(lines(3200, 0)), epochs=EPOCHS, eval_data=rc.data.dataset(unseen))
if history.stopped:
    raise SystemExit(history.stopped)
for epoch in history.epochs:
    print(f"epoch {epoch['epoch']}: loss {epoch['train']['loss']:.3f}, character errors {epoch['eval']['cer']:.1%}")
scores = program.evaluate({name: rows[:BATCH] for name, rows in unseen.items()}, ["scores"])[0]
for width in (1, 8):
    read = rc.metrics.ctc_decode(scores[:, :4], width=width, batch_first=False)
    print(f"width {width}:", *("".join(list(LETTERS)[c - 1] for c in word) for word in read))
print("written:", *("".join(list(LETTERS)[c - 1] for c in row if c > 0) for row in unseen["label"][:4]))
