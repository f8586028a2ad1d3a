"""`dataset(source)`: a dataset or stream of anything that has samples."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, UsageError, expect, nearest
from .arrays import Arrays, from_arrays, mapped_npy
from .base import Dataset, Stream
from .combining import select
from .foreign import Batches, HuggingFace, Samples, has_samples, is_frame, is_hugging_face, is_loader, is_stream
from .images import ImageFolder, is_image_folder
from .json_lines import from_jsonl
from .npz import from_npz
from .tables import from_csv, from_parquet

__all__ = ["Dataset", "Stream", "dataset"]

Columns = Sequence[str] | Mapping[str, str | Sequence[str]]


def _one_npy(path: Path) -> Arrays:
    return from_arrays({path.stem: mapped_npy(path)}, f"'{path}'")


#: end of a file's name → what reads it
_FILES: dict[str, Callable[..., Dataset]] = {
    ".npz": from_npz,
    ".npy": _one_npy,
    ".csv": from_csv,
    ".tsv": from_csv,
    ".parquet": from_parquet,
    ".jsonl": from_jsonl,
}


def dataset(source: Any, columns: Columns | None = None, **options: Any) -> Dataset | Stream:
    """A dataset of `source`, or a stream where its samples cannot be taken in any order.

    Arrays (NumPy's, PyTorch's, CuPy's, paths of .npy files) by column; the path of an .npz, .npy, .csv, .tsv,
    .parquet or .jsonl file, or of a folder of .npy files, of Parquet files, or of images in a folder for each class; a
    `datasets.Dataset`; a dataset or DataLoader of PyTorch; an iterable of batches, or a function that returns one.

    `columns`: the columns to keep; or new name → column, or → columns that make a row; of samples and batches that are
    tuples, their names by position.  `options` are those of the source (see docs/data.md).  UsageError for what is no
    source, ModelError for a file that cannot be read.
    """
    if isinstance(source, (str, Path)):
        return _chosen(_opened(Path(source), options, _sources(columns)), columns)
    if isinstance(source, Dataset):
        data: Dataset | Stream = source
    elif isinstance(source, Stream):
        data = source
    elif isinstance(source, Mapping):
        if splits := [n for n, v in source.items() if is_hugging_face(v)]:
            raise UsageError(f"this is a dict of datasets, of which one is needed: {', '.join(map(repr, splits))}")
        data = from_arrays(_only(source, _sources(columns)))
    elif is_frame(source):
        only = _only({c: source[c] for c in source.columns}, _sources(columns))
        data = from_arrays({str(c): v.to_numpy() for c, v in only.items()}, "the data frame")
    elif is_hugging_face(source):
        data = HuggingFace(source)
    else:
        return _by_position(source, columns, options)
    _no_options(source, options)
    if isinstance(data, Stream) and columns is not None:
        raise UsageError("columns= does not apply to a stream that is one already")
    return data if isinstance(data, Stream) else _chosen(data, columns)


def _by_position(source: Any, columns: Columns | None, options: Mapping[str, Any]) -> Dataset | Stream:
    """Datasets and batches whose values may be without names."""
    _no_options(source, options)
    names = None if columns is None else list(columns)
    if isinstance(columns, Mapping):
        raise UsageError("columns= must be a list of names here: one for each value of a sample")
    if isinstance(source, (np.ndarray, bytes)) or hasattr(source, "__dlpack__"):
        raise UsageError(
            f"one {type(source).__name__} has no name as a column: give a dict, {{'x': ..., 'label': ...}}"
        )
    if is_loader(source):
        return Batches(source, names)
    if has_samples(source):
        return Samples(source, names)
    if not is_stream(source):
        raise UsageError(f"an object of type {type(source).__name__} is no source of data (see docs/data.md)")
    return Batches(source, names)


def _sources(columns: Columns | None) -> set[str] | None:
    """The names in the source of the columns that are kept; None: all."""
    if columns is None or isinstance(columns, str):
        return None
    wanted = "names of columns, or names of inputs by column"
    values = columns.values() if isinstance(columns, Mapping) else expect("columns", columns, Iterable, wanted)
    return {name for value in values for name in ((value,) if isinstance(value, str) else value)}


def _only(arrays: Mapping[str, Any], wanted: set[str] | None) -> Mapping[str, Any]:
    """The arrays that are wanted, if all are there: others may have other lengths."""
    if wanted is None or not wanted <= set(arrays):
        return arrays
    return {n: a for n, a in arrays.items() if n in wanted}


def _opened(path: Path, options: Mapping[str, Any], wanted: set[str] | None) -> Dataset:
    if path.is_dir():
        return _of_folder(path, options, wanted)
    read = _FILES.get(path.suffix.lower())
    if read is None:
        raise UsageError(f"'{path}' is no known kind of data: a folder, or a file that ends in {', '.join(_FILES)}")
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ModelError(f"cannot read the data file '{path}': it does not exist{nearest(path.name, beside)}")
    return _called(functools.partial(read, wanted=wanted) if read is from_npz else read, path, options)


def _of_folder(path: Path, options: Mapping[str, Any], wanted: set[str] | None) -> Dataset:
    """The dataset of a folder, by what lies in it."""
    tables = sorted(path.glob("*.parquet"))
    if tables:
        return _called(from_parquet, tables, options)
    arrays = sorted(path.glob("*.npy"))
    if arrays:
        _no_options(path, options)
        return from_arrays(_only({p.stem: p for p in arrays}, wanted), f"'{path}'")
    if is_image_folder(path):
        return _called(ImageFolder, path, options)
    raise ModelError(
        f"the folder '{path}' has no data: it needs folders of images (one for each class), .npy or .parquet files"
    )


def _called(read: Callable[..., Dataset], path: Any, options: Mapping[str, Any]) -> Dataset:
    parameters = [p for p in list(inspect.signature(read).parameters)[1:] if p != "wanted"]
    for name in options:
        if name not in parameters:
            has = f"it takes: {', '.join(parameters)}" if parameters else "it takes none"
            raise UsageError(f"'{path}' is read without an option '{name}'{nearest(name, parameters)}; {has}")
    return read(path, **options)


def _no_options(source: Any, options: Mapping[str, Any]) -> None:
    if options:
        raise UsageError(f"a source of type {type(source).__name__} takes no option '{next(iter(options))}'")


def _chosen(data: Dataset, columns: Columns | None) -> Dataset:
    return data if columns is None else select(data, columns)
