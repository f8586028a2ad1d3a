// Trains with a step in WebAssembly: FOLDER STEPS.  Prints the losses of the steps, an evaluation, and one more step.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, steps] = process.argv.slice(2);
const { load } = await import(pathToFileURL(`${folder}/step.js`));
const wasm = readFileSync(`${folder}/step.wasm`);
const batch = readFileSync(`${folder}/batch.bin`);

function feed(step, input, names) {
  let at = 0;
  for (const name of names) {
    const array = input.call(step, name);
    new Uint8Array(array.buffer, array.byteOffset, array.byteLength).set(batch.subarray(at, at + array.byteLength));
    at += array.byteLength;
  }
}

const step = await load(wasm, readFileSync(`${folder}/step.safetensors`));
for (let i = 0; i < Number(steps); i++) {
  feed(step, step.input, step.inputs);
  step.run();
  console.log(step.numbers(step.loss)[0]);
}
feed(step, step.evaluationInput, step.inputs);
step.evaluate();
console.log(step.evaluationNumbers(step.loss)[0]);
const saved = step.save();
writeFileSync(`${folder}/out.safetensors`, saved);
const other = await load(wasm, saved);
feed(other, other.input, other.inputs);
other.run();
console.log(other.output(other.loss)[0]);
console.log(step.bytes);
