"""Columns of text as numbers of words, by the library tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, UsageError, load_extra
from ..support.files import regular
from .base import Dataset, Wrapped, is_text, need_column, show_column

#: fields of an encoding that become columns
_PARTS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


class Tokenized(Wrapped):
    """A column of text, or a pair of columns, as `input_ids`, `attention_mask` and `token_type_ids` (int64[length]).

    `tokenizer`: one of the library tokenizers, one of transformers that is made of it, or the path of a tokenizer.json,
    or of a vocab.txt of BERT (`lower`: one of small letters).  Longer texts are cut, shorter ones padded.  The other
    columns stay.
    """

    def __init__(
        self, inner: Dataset, column: str | Sequence[str], tokenizer: Any, length: int, lower: bool = True
    ) -> None:
        super().__init__(inner)
        self.texts = (column,) if isinstance(column, str) else tuple(column)
        if len(self.texts) not in (1, 2):
            raise UsageError(f"one column of text or a pair of them is tokenized, not {len(self.texts)}")
        for name in self.texts:
            kind = need_column(inner, name)
            if not is_text(kind[0]) or kind[1]:
                raise UsageError(f"column '{name}' of {self.name} has samples of {show_column(kind)}, not of text")
        self.tokenizer = _prepared(tokenizer, length, lower)
        least = self.tokenizer.num_special_tokens_to_add(len(self.texts) == 2)
        if length <= least:
            raise UsageError(f"length must be more than the {least} special words of each text, not {length}")
        kept = {n: c for n, c in inner.columns.items() if n not in self.texts}
        if double := next((n for n in _PARTS if n in kept), None):
            raise UsageError(f"{self.name} has a column '{double}' already")
        self.costly = inner.costly | set(_PARTS)
        self.columns = {**kept, **{name: (np.dtype(np.int64), (length,)) for name in _PARTS}}

    @property
    def words(self) -> int:
        """Number of words that the tokenizer knows: `input_ids` are below it."""
        return self.tokenizer.get_vocab_size()

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        parts = [n for n in names if n in _PARTS]
        kept = [n for n in names if n not in _PARTS]
        taken = self.inner.read(indices, [*kept, *(self.texts if parts else ())])
        arrays = {n: taken[n] for n in kept}
        if parts:
            columns = [[str(text) for text in taken[n]] for n in self.texts]
            texts = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
            encodings = self.tokenizer.encode_batch(texts)
            for n in parts:
                shape = len(indices), *self.columns[n][1]
                arrays[n] = np.array([getattr(e, _PARTS[n]) for e in encodings], np.int64).reshape(shape)
        return {n: arrays[n] for n in names}


def _prepared(source: Any, length: int, lower: bool) -> Any:
    """A copy of a tokenizer that gives `length` words a text; the given one stays as it is."""
    library = load_extra("tokenizers", "text", "tokenizing")
    if isinstance(source, (str, Path)):
        tokenizer = _from_file(library, Path(source), lower)
    else:
        inside = getattr(source, "backend_tokenizer", None) or getattr(source, "_tokenizer", None) or source
        if not isinstance(inside, library.Tokenizer):
            kind = type(source).__name__
            raise UsageError(f"a tokenizer of the library tokenizers, or the path of one, is needed, not {kind}")
        tokenizer = library.Tokenizer.from_str(inside.to_str())
    padding = tokenizer.padding or {}
    words = (w for w in ("[PAD]", "<pad>") if tokenizer.token_to_id(w) is not None)
    word = padding.get("pad_token") or next(words, "[PAD]")
    number = padding.get("pad_id", tokenizer.token_to_id(word) or 0)
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=number, pad_token=word)
    return tokenizer


def _from_file(library: Any, path: Path, lower: bool) -> Any:
    try:
        text = regular(path).read_text(encoding="utf-8")
        if path.suffix == ".json":
            return library.Tokenizer.from_str(text)
        words = text.splitlines()
        if "[UNK]" not in words or "[SEP]" not in words or "[CLS]" not in words:
            raise ValueError("a vocab.txt of BERT has the words [UNK], [CLS] and [SEP]")
        vocabulary = {word: i for i, word in enumerate(words)}
        return library.implementations.BertWordPieceTokenizer(vocabulary, lowercase=lower)._tokenizer
    except OSError as e:
        raise ModelError(f"cannot read the tokenizer '{path}': {e.strerror or e}") from None
    except Exception as e:  # the library raises plain exceptions
        raise ModelError(f"cannot read the tokenizer '{path}': not a tokenizer.json or vocab.txt ({e})") from None
