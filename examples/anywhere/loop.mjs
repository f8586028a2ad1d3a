// Trains an exported step in JavaScript: weights in, weights out.
//
//   recompute-compile lenet --batch 8 --optimizer momentum --lr 0.01 -o step.onnx
//   npm install onnxruntime-node && node loop.mjs step.onnx 5
//
// The batch here is a pattern of numbers, the same as in loop.py; feed yours.
import fs from 'node:fs';
import { createRequire } from 'node:module';
const ort = createRequire(process.cwd() + '/')('onnxruntime-node');

const kinds = { F32: ['float32', Float32Array], F64: ['float64', Float64Array], I64: ['int64', BigInt64Array],
  I32: ['int32', Int32Array], BOOL: ['bool', Uint8Array] };

// A safetensors file: the length of a JSON header (8 bytes), the header, the data.
function safetensors(path) {
  const file = fs.readFileSync(path), start = 8 + Number(file.readBigUInt64LE(0));
  const { __metadata__: metadata, ...header } = JSON.parse(file.subarray(8, start));
  const tensors = Object.entries(header).map(([name, { dtype, shape, data_offsets: [begin, end] }]) => {
    const [type, array] = kinds[dtype], bytes = Uint8Array.from(file.subarray(start + begin, start + end));
    return [name, new ort.Tensor(type, new array(bytes.buffer), shape)];
  });
  return [Object.fromEntries(tensors), metadata];
}

function pattern({ type, shape }) {
  const size = shape.reduce((a, b) => a * b, 1);
  const data = type === 'int64' ? BigInt64Array.from({ length: size }, (_, i) => BigInt(i * 7 % 2))
    : Float32Array.from({ length: size }, (_, i) => (i * 7 % 17 - 8) / 8);
  return new ort.Tensor(type, data, shape);
}

const [path, steps] = process.argv.slice(2);
const [state, metadata] = safetensors(path.replace(/\.onnx$/, '.state.safetensors'));
const updates = Object.entries(JSON.parse(metadata.updates)); // [weight, output with its new contents]
const session = await ort.InferenceSession.create(path);
const inputs = session.inputMetadata.filter((i) => !(i.name in state));
const batch = Object.fromEntries(inputs.map((i) => [i.name, pattern(i)]));
for (let step = 0; step < steps; step++) {
  const out = await session.run({ ...batch, ...state });
  for (const [name, after] of updates) state[name] = out[after];
  console.log(out.loss.data[0]);
}
