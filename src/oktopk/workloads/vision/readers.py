"""Published image files: CIFAR-10 pickles, MNIST IDX, folders of images. Checked, and never executed."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oktopk.errors import DataError

Pixels = NDArray[np.uint8]  # [n, height, width, channels]
Labels = NDArray[np.int64]  # [n]
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")

CIFAR_ARCHIVE = "cifar-10-python.tar.gz"
CIFAR_WHERE = f"get {CIFAR_ARCHIVE} (163 MB, md5 c58f30108f718f92721af3b95e74349a) from Krizhevsky's CIFAR page."
CIFAR_MD5 = {  # of the members, as published: the archive may have been packed again
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
MNIST_WHERE = "get the four files (.gz or unpacked) from a mirror of LeCun's MNIST page."


@dataclass(frozen=True)
class Arrays:
    """A whole image set in memory."""

    train: Pixels
    train_labels: Labels
    valid: Pixels
    valid_labels: Labels
    classes: tuple[str, ...]


def read_cifar10(path: Path, verify: bool = True) -> Arrays:
    """CIFAR-10 from the python archive or its folder. `verify`: compare the published checksums."""
    files = dict(_cifar_files(path))
    missing = [name for name in CIFAR_MD5 if name not in files]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}: {CIFAR_WHERE}")
    batches = {name: _cifar_batch(path, name, files[name], verify) for name in CIFAR_MD5}
    train = [batches[name] for name in CIFAR_MD5 if name != "test_batch"]
    return Arrays(
        np.concatenate([pixels for pixels, _ in train]),
        np.concatenate([labels for _, labels in train]),
        *batches["test_batch"],
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    )


def read_mnist(folder: Path) -> Arrays:
    """MNIST (or a set of its form) from IDX files, gzipped or not."""
    parts = [_read_idx(folder, name) for name in MNIST_FILES]
    for images, labels, name in ((parts[0], parts[1], MNIST_FILES[1]), (parts[2], parts[3], MNIST_FILES[3])):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(f"{folder}: {len(images)} images, but {name} has {len(labels)} labels: {MNIST_WHERE}")
        _check_labels(labels, 10, folder / name)
    return Arrays(
        parts[0][..., None],
        parts[1].astype(np.int64),
        parts[2][..., None],
        parts[3].astype(np.int64),
        classes=tuple(str(digit) for digit in range(10)),
    )


def list_folder(folder: Path) -> tuple[tuple[str, ...], dict[str, list[tuple[Path, int]]]]:
    """Class names, and the (file, label) pairs of 'train' and 'val', from `train/CLASS/*` and `val/CLASS/*`."""
    valid = next((name for name in ("val", "valid", "test") if (folder / name).is_dir()), None)
    if not (folder / "train").is_dir() or valid is None:
        raise DataError(
            f"{folder} must hold train/CLASS/IMAGES and val/CLASS/IMAGES: sort the images into such folders."
        )
    classes = tuple(sorted(part.name for part in (folder / "train").iterdir() if part.is_dir()))
    if len(classes) < 2:
        raise DataError(f"{folder / 'train'} has {len(classes)} class folders: at least two are needed.")
    return classes, {"train": _listed(folder / "train", classes), "val": _listed(folder / valid, classes)}


def read_image(path: Path) -> Any:
    """A decoded RGB pillow image; a file that is none is an error that names it."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise DataError(f"{path} is not a readable image ({error}): remove or replace it.") from None


def _listed(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).glob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    unknown = [part.name for part in folder.iterdir() if part.is_dir() and part.name not in classes]
    if unknown:
        raise DataError(
            f"{folder} has classes that train has not: {', '.join(sorted(unknown))}. Remove or rename them."
        )
    if not found:
        raise DataError(f"{folder} holds no images ({', '.join(SUFFIXES)}): fill its class folders.")
    return found


def _cifar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        folder = path if (path / "test_batch").is_file() else path / "cifar-10-batches-py"
        for name in CIFAR_MD5:
            if (folder / name).is_file():
                yield name, (folder / name).read_bytes()
        return
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file and PurePosixPath(member.name).name in CIFAR_MD5:
                    yield PurePosixPath(member.name).name, file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{path} cannot be read as an archive ({error}): {CIFAR_WHERE}") from None


def _cifar_batch(path: Path, name: str, data: bytes, verify: bool) -> tuple[Pixels, Labels]:
    if verify and hashlib.md5(data).hexdigest() != CIFAR_MD5[name]:
        raise DataError(
            f"{path}: {name} ({len(data)} bytes) has not the published md5 {CIFAR_MD5[name]}, so it is damaged or "
            f"another set: {CIFAR_WHERE} To read a set of your own in this format, turn `verify` off."
        )
    try:
        batch = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"], dtype=np.int64)
    except DataError as error:
        raise DataError(f"{path}: {name} {error}") from None
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise DataError(f"{path}: {name} is truncated or no CIFAR-10 batch ({error}): {CIFAR_WHERE}") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072 or len(pixels) != len(labels):
        raise DataError(
            f"{path}: {name} holds {pixels.dtype} {pixels.shape} and {len(labels)} labels where 32x32 colour images of "
            f"3072 bytes were expected: {CIFAR_WHERE}"
        )
    _check_labels(labels, 10, path / name)
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, containers and plain numpy arrays; refuses to call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("._core", ".core"), name) == ("numpy.core.multiarray", "_reconstruct"):
            return _empty_array
        if (module, name) == ("numpy", "dtype"):
            return _plain_dtype
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise DataError(f"asks for {module}.{name}, which no CIFAR-10 batch needs: it is not run. {CIFAR_WHERE}")


def _empty_array(*_: Any) -> NDArray[Any]:
    """A fresh array whatever class the pickle names; its state comes next."""
    return np.ndarray((0,), dtype=np.uint8)


def _plain_dtype(code: Any, *_: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(code)
    if dtype.hasobject or dtype.names:
        raise DataError(f"holds an array of {dtype}, not of plain numbers: {CIFAR_WHERE}")
    return dtype


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


_IDX_UBYTE = 0x08


def _read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    path = next((folder / (name + end) for end in ("", ".gz") if (folder / (name + end)).is_file()), None)
    if path is None:
        raise DataError(f"{folder} lacks {name}[.gz]: {MNIST_WHERE}")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}): {MNIST_WHERE}") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _IDX_UBYTE:
        raise DataError(f"{path} is no IDX file of bytes (it starts with {data[:4].hex()}): {MNIST_WHERE}")
    shape = np.frombuffer(data, ">u4", min(data[3], (len(data) - 4) // 4), offset=4).astype(int)
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape))
    if len(shape) != data[3] or body.size != np.prod(shape):
        raise DataError(f"{path} is truncated: {body.size} bytes where its header says {tuple(shape)}: {MNIST_WHERE}")
    return body.reshape(shape)


def _check_labels(labels: NDArray[Any], classes: int, path: Path) -> None:
    if labels.size == 0:
        raise DataError(f"{path} is empty: get the file again.")
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"{path}: labels reach from {labels.min()} to {labels.max()}, expected 0 to {classes - 1}: get it again."
        )
