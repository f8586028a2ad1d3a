"""Columns of text as numbers of words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute.data import Dataset, Tokenized, dataset
from recompute.errors import MissingExtraError, ModelError, UsageError

tokenizers = pytest.importorskip("tokenizers")
TEXTS = ["the cat sat", "a dog barked at the cat", "dogs and cats"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "a", "dog", "##s", "and"]
IDS = {word: i for i, word in enumerate(WORDS)}


def data() -> Dataset:
    found = dataset({"text": TEXTS, "second": TEXTS[::-1], "label": np.arange(3)})
    assert isinstance(found, Dataset)
    return found


def vocabulary(folder: Path) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return path


def words(ids: Any) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_texts_are_cut_and_padded(tmp_path: Path) -> None:
    found = Tokenized(data(), "text", vocabulary(tmp_path), 6)
    taken = found.take(np.array([2, 0, 1]))
    assert list(taken) == ["second", "label", "input_ids", "attention_mask", "token_type_ids"]
    assert [words(ids) for ids in taken["input_ids"]] == [
        "[CLS] dog ##s and cat ##s"[: -len(" ##s")] + " [SEP]",
        "[CLS] the cat sat [SEP] [PAD]",
        "[CLS] a dog [UNK] [UNK] [SEP]",
    ]
    assert taken["attention_mask"].tolist() == [[1] * 6, [1] * 5 + [0], [1] * 6]
    assert all(taken[n].dtype == np.int64 and found.columns[n][1] == (6,) for n in list(taken)[2:])
    assert taken["label"].tolist() == [2, 0, 1] and found.words == len(WORDS) and not taken["token_type_ids"].any()
    assert list(found.read(np.array([1]), ["label"])) == ["label"]


def test_pairs(tmp_path: Path) -> None:
    found = Tokenized(data(), ("text", "second"), vocabulary(tmp_path), 10).take(np.array([0]))
    assert words(found["input_ids"][0]) == "[CLS] the cat sat [SEP] dog ##s and cat [SEP]"
    assert found["token_type_ids"].tolist() == [[0] * 5 + [1] * 5] and "text" not in found


def test_tokenizers_of_the_library_are_not_changed(tmp_path: Path) -> None:
    trained = tokenizers.implementations.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<pad>"], show_progress=False)
    trained.save(str(tmp_path / "t.json"))
    before = trained.to_str()
    found = [Tokenized(data(), "text", t, 12).take(np.arange(3))["input_ids"] for t in (trained, tmp_path / "t.json")]
    np.testing.assert_array_equal(*found)
    assert trained.decode(found[0][0].tolist()).strip() == TEXTS[0] and trained.to_str() == before
    assert trained.token_to_id("<pad>") in found[0]


@pytest.mark.parametrize("column, tokenizer, length, message", [
    ("label", None, 8, r"column 'label' of arrays has samples of int64\[\], not of text"),
    ("txt", None, 8, r"no column 'txt' \(did you mean text"),
    ("text", None, 2, "length must be more than the 2 special words"),
    (("text", "second"), None, 3, "more than the 3 special words"),
    (("text",) * 3, None, 8, "not 3"),
    ("text", 3, 8, "a tokenizer of the library tokenizers, or the path of one, is needed, not int"),
])  # fmt: skip
def test_requests_that_are_wrong(column: Any, tokenizer: Any, length: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Tokenized(data(), column, vocabulary(tmp_path) if tokenizer is None else tokenizer, length)


def test_files_that_are_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "x.txt").write_text("a\nb\n")
    for name, message in (
        ("none.json", "No such file"), ("x.json", "not a tokenizer.json"), ("x.txt", r"has the words \[UNK\]"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=f"cannot read the tokenizer '.*{name}': .*{message}"):
            Tokenized(data(), "text", tmp_path / name, 8)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"'tokenizers'.*onnx-recompute\[text\]"):
        Tokenized(data(), "text", vocabulary(tmp_path), 8)
