// A training step of @MODEL@ in WebAssembly: a loader for browsers and Node.js.  Generated.
//
//     import { load } from "./NAME.js";
//     const step = await load(wasmBytes, weightsBytes);   // two Uint8Arrays or ArrayBuffers
//     step.input("x").set(...);                           // a typed array in the step's memory
//     step.run();
//     const [loss] = step.numbers(step.loss);
//
// The step's memory is one number of bytes, known before: step.bytes.  Errors are thrown with what is wrong.

const INPUTS = @INPUTS@;
const OUTPUTS = @OUTPUTS@;
const EVALUATION_INPUTS = @EVALUATION_INPUTS@;
const EVALUATION_OUTPUTS = @EVALUATION_OUTPUTS@;
const VALUES = @VALUES@;
const KINDS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, uint64: BigUint64Array, int32: Int32Array,
  uint32: Uint32Array, int16: Int16Array, uint16: Uint16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
  float16: Uint16Array, bfloat16: Uint16Array, // their bits; `numbers` decodes them
};
const PAGE = 65536;

/** Functions of C's mathematics that kernels call, by Math's of the same name; those of float32 end with f. */
function mathematics(module) {
  const found = {};
  for (const { name } of WebAssembly.Module.imports(module)) {
    const single = !(name in Math) && name.endsWith("f");
    const f = Math[single ? name.slice(0, -1) : name];
    if (!f) throw new Error(`Math has no ${name}`);
    found[name] = single ? (...x) => Math.fround(f(...x)) : f;
  }
  return found;
}

/** A float16 by its bits. */
function half(bits) {
  const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 1024 + fraction : fraction) * 2 ** (Math.max(exponent, 1) - 25);
}

/** Elements as numbers: those of 16-bit floats are decoded, others are as they are. */
function decoded(array, kind) {
  if (kind === "bfloat16") return new Float32Array(Uint32Array.from(array, (bits) => bits << 16).buffer);
  return kind === "float16" ? Float32Array.from(array, half) : array;
}

class Step {
  constructor(exports) {
    this.c = exports;
    this.loss = @LOSS@;
    this.inputs = Object.keys(INPUTS);
    this.evaluationInputs = Object.keys(EVALUATION_INPUTS);
    this.evaluationOutputs = Object.keys(EVALUATION_OUTPUTS);
    this.bytes = exports.step_memory() >>> 0; // of 32 bits, which JavaScript takes for signed
    this.text = (exports.__heap_base.value + 63) & ~63; // names are written here, then the step's memory begins
    this.at = this.text + 1024;
    this.room(this.at + this.bytes);
  }

  room(end) {
    const more = end - this.c.memory.buffer.byteLength;
    if (more > 0) this.c.memory.grow(Math.ceil(more / PAGE));
  }

  check(code) {
    if (code) throw new Error(this.error());
  }

  error() {
    const bytes = new Uint8Array(this.c.memory.buffer, this.c.step_error() >>> 0);
    return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
  }

  array(find, table, name) {
    if (!Object.hasOwn(table, name)) throw new Error(`there is no value '${name}': ${Object.keys(table).join(", ")}`);
    const bytes = new TextEncoder().encode(name + "\0");
    new Uint8Array(this.c.memory.buffer, this.text, 1024).set(bytes);
    const [kind, shape] = table[name];
    return new KINDS[kind](this.c.memory.buffer, find(this.at, this.text) >>> 0, shape.reduce((a, b) => a * b, 1));
  }

  /** Where the elements of an input go; other memory than before after `load` or `save`: ask again. */
  input(name) { return this.array(this.c.step_input, INPUTS, name); }
  output(name) { return this.array(this.c.step_output, OUTPUTS, name); }
  evaluationInput(name) { return this.array(this.c.step_evaluation_input, EVALUATION_INPUTS, name); }
  evaluationOutput(name) { return this.array(this.c.step_evaluation_output, EVALUATION_OUTPUTS, name); }
  /** An output's numbers, also of 16-bit floats. */
  numbers(name) { return decoded(this.output(name), OUTPUTS[name][0]); }
  evaluationNumbers(name) { return decoded(this.evaluationOutput(name), EVALUATION_OUTPUTS[name][0]); }
  /** A weight or a state of the optimizer, such as its learning rate. */
  value(name) { return this.array(this.c.step_value, VALUES, name); }
  /** One training step. */
  run() { this.check(this.c.step_run(this.at)); }
  /** The forward pass in inference mode. */
  evaluate() { this.check(this.c.step_evaluate(this.at)); }

  /** Takes the weights and the optimizer's state from the contents of a safetensors file. */
  load(weights) {
    const bytes = new Uint8Array(weights.buffer ?? weights, weights.byteOffset ?? 0, weights.byteLength);
    const room = this.at + this.bytes;
    this.room(room + bytes.length);
    new Uint8Array(this.c.memory.buffer, room).set(bytes);
    this.check(this.c.step_load(this.at, room, bytes.length));
  }

  /** The contents of such a file, a copy. */
  save() {
    const room = this.at + this.bytes, size = this.c.step_size() >>> 0;
    this.room(room + size);
    this.check(this.c.step_store(this.at, room));
    return new Uint8Array(this.c.memory.buffer.slice(room, room + size));
  }
}

/** A step with its weights, from the contents of NAME.wasm and of NAME.safetensors. */
export async function load(wasm, weights) {
  const module = await WebAssembly.compile(wasm);
  const step = new Step((await WebAssembly.instantiate(module, { env: mathematics(module) })).exports);
  step.load(weights);
  return step;
}
