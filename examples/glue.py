"""Fine-tune BERT for a task of GLUE's form, with checkpoints at its blocks and mixed precision, as in Paddle's example.

    python examples/glue.py --train SST-2/train.tsv --eval SST-2/dev.tsv --vocabulary vocab.txt --model bert-large
    python examples/glue.py                # generated sentences, a word list made of them, BERT tiny
    python examples/glue.py --max-batch    # the biggest batches of BERT-large on a V100 of 32 GiB: planned, not run

The files have a header, tabs, and columns `sentence` and `label`.  Plain and recomputed runs end with the same bits.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from tokenizers.implementations import BertWordPieceTokenizer

import recompute as rc

_GOOD, _BAD = ("fine great lovely warm bright clever charming", "dull poor weak slow cold empty tired")
_WORDS = "the a this film story actor plot scene ending music was is seems felt quite very rather so and but"


def generated(folder: Path) -> tuple[Path, Path]:
    """Sentences whose label follows from two words among others: 384 to train on, 96 to evaluate."""
    g = np.random.default_rng(0)
    for name, count in (("train.tsv", 384), ("dev.tsv", 96)):
        lines = ["sentence\tlabel"]
        for label in g.integers(0, 2, count):
            words = list(g.choice(_WORDS.split(), g.integers(4, 9)))
            for tone in g.choice((_GOOD if label else _BAD).split(), 2):
                words.insert(g.integers(len(words) + 1), str(tone))
            lines.append(f"{' '.join(words)}\t{label}")
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder / "train.tsv", folder / "dev.tsv"


def max_batches(model: str, length: int) -> None:
    """What fits 32 GiB: plain, with the blocks as checkpoints, and by plans.

    Paddle's guide gives 18 plain, 180 with checkpoints and 258 with these offloaded, at sequence 512.
    """
    blocks = [c for c in rc.models.info(model).checkpoints if c.startswith("layer.")]
    found = rc.max_batch(
        model, "32GiB", checkpoints=blocks, optimizer=rc.AdamW(1e-4), options={"seq": length},
        target=rc.Target(rc.CUDAPlace(), precision="fp16", cost=rc.cost.device("v100-32")), slicing=False,
    )  # fmt: skip
    print(found)


def trained(model: str, train: rc.data.Dataset, held: rc.data.Dataset, options: dict, args: argparse.Namespace) -> list:
    """Trains plain and recomputed; returns the hashes of the weights."""
    hashes = []
    for kind in ("plain", "recomputed"):
        program = rc.load(rc.models.build(model, **options), batch=args.batch)
        optimizer = rc.amp.decorate(rc.AdamW(args.lr), dtype="bfloat16")
        if kind == "recomputed":
            blocks = [c for c in rc.models.info(model, **options).checkpoints if c.startswith("layer.")]
            optimizer = rc.RecomputeOptimizer(optimizer).set_checkpoints(blocks)
        trainer = rc.Trainer(program, optimizer, loss="cross_entropy", metrics=[rc.metrics.Accuracy()])
        history = trainer.fit(train, epochs=args.epochs, eval_data=held)
        if history.stopped:
            raise SystemExit(history.stopped)
        accuracy = history.epochs[-1]["eval"]["accuracy"]
        hashes.append(history.weights_sha256)
        print(f"{kind:10} accuracy {accuracy:.4f}  peak {history.peak_bytes['measured'] / 2**20:7.1f} MiB", flush=True)
    return hashes


def vocabulary(train: rc.data.Dataset, folder: Path) -> Path:
    """The file of a vocabulary of 200 words of the sentences."""
    words = BertWordPieceTokenizer()
    words.train_from_iterator(train.take(np.arange(len(train)))["sentence"], vocab_size=200, show_progress=False)
    words.save_model(str(folder))
    return folder / "vocab.txt"


def main() -> None:
    """Trains, or plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="tab-separated file with the columns sentence and label")
    parser.add_argument("--eval", type=Path, help="the same, to evaluate")
    parser.add_argument("--vocabulary", type=Path, help="BERT's vocab.txt (default: words of the training file)")
    parser.add_argument("--model", help="bert-tiny (default) to bert-large")
    parser.add_argument("--length", type=int, help="tokens of a sentence (default: 16; of real files 128)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-batch", action="store_true", help="only print the biggest batches")
    args = parser.parse_args()
    if args.max_batch:
        return max_batches(args.model or "bert-large", args.length or 512)
    with tempfile.TemporaryDirectory() as folder:
        files = (args.train, args.eval) if args.train else generated(Path(folder))
        length = args.length or (128 if args.train else 16)
        train, held = (rc.data.dataset(f) for f in files)
        words = args.vocabulary or vocabulary(train, Path(folder))
        train, held = (rc.data.Tokenized(d, "sentence", words, length=length) for d in (train, held))
        options = {"seq": length, "vocab": train.words, "dropout": 0.1}
        hashes = trained(args.model or "bert-tiny", train, held, options, args)
        print("the same bits" if hashes[0] == hashes[1] else "DIFFERENT")
    return None


if __name__ == "__main__":
    main()
