"""Image sets, in memory or streamed from a folder, and batches of them, augmented all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.errors import DataError
from oktopk.workloads.cache import cached_folder, fingerprint
from oktopk.workloads.vision import shapes
from oktopk.workloads.vision.readers import (
    CIFAR_MD5,
    CIFAR_WHERE,
    MNIST_FILES,
    Arrays,
    Labels,
    Pixels,
    list_folder,
    read_cifar10,
    read_image,
    read_mnist,
)

EMBEDDED = "shapes"
TRAIN_SHAPES, VALID_SHAPES = 12_000, 2_000
_SHAPES_SEED = 20220402
_JUDGE_EVERY = 12  # one training image of so many, when others are not to be seen
Generator = np.random.Generator


class ImageSet(Protocol):
    """Images by number."""

    def __len__(self) -> int: ...

    def take(self, numbers: NDArray[np.int64], rng: Generator | None) -> tuple[Pixels, Labels]:
        """Images [n, height, width, channels] and labels; with a generator, augmented where the set does it itself."""
        ...


@dataclass(frozen=True)
class Images:
    """What a workload trains on."""

    layout: str
    train: ImageSet
    valid: ImageSet
    classes: tuple[str, ...]
    size: int
    channels: int


def load_images(data: str, size: int, resize: bool, verify: bool) -> Images:
    """The set named by 'shapes' or a path. `resize`: stream images of any size from a folder, scaled to `size`."""
    if data == EMBEDDED:
        return _in_memory("shapes", _cached_arrays("shapes", (3, TRAIN_SHAPES, VALID_SHAPES), _draw_shapes))
    path = Path(data).expanduser()
    layout = find_layout(path)
    if layout == "CIFAR-10":
        key = (*_stamp(path), verify)
        return _in_memory(layout, _cached_arrays("cifar10", key, lambda: read_cifar10(path, verify)))
    if layout == "MNIST":
        return _in_memory(layout, read_mnist(path))
    classes, listed = list_folder(path)
    if resize:
        train, valid = StreamedImages(listed["train"], size), StreamedImages(listed["val"], size)
        return Images(layout, train, valid, classes, size, channels=3)
    key = (size, classes, *(fingerprint(file) for part in listed.values() for file, _ in part))
    return _in_memory(layout, _cached_arrays("images", key, lambda: _decoded_folder(listed, classes, size)))


def write_for_tuning(images: Images, folder: Path) -> None:
    """A folder of images in which training images judge, one in twelve, and the validation part is unseen."""
    from PIL import Image

    if (folder / "train").exists():
        raise DataError(f"{folder} holds images already: name another folder.")
    for number in range(len(images.train)):
        (pixels,), (label,) = images.train.take(np.array([number]), None)
        part = folder / ("train" if (number + 1) % _JUDGE_EVERY else "val") / images.classes[label]
        part.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.squeeze()).save(part / f"{number:06d}.png")


def find_layout(path: Path) -> str:
    """Which published layout a path has."""
    if not path.exists():
        raise DataError(
            f"{path} does not exist. Use '{EMBEDDED}', a folder of images, MNIST's folder, or CIFAR-10: {CIFAR_WHERE}"
        )
    if path.is_file() or any((path / name).exists() for name in (*CIFAR_MD5, "cifar-10-batches-py")):
        return "CIFAR-10"
    if any((path / (name + end)).exists() for name in MNIST_FILES for end in ("", ".gz")):
        return "MNIST"
    return "image folder"


class ArrayImages:
    """Images in memory."""

    def __init__(self, pixels: Pixels, labels: Labels) -> None:
        self._pixels, self._labels = pixels, labels

    def __len__(self) -> int:
        return len(self._labels)

    def take(self, numbers: NDArray[np.int64], rng: Generator | None) -> tuple[Pixels, Labels]:
        return self._pixels[numbers], self._labels[numbers]


class StreamedImages:
    """Images decoded when they are needed: a random part of each for training, its centre otherwise."""

    def __init__(self, files: list[tuple[Path, int]], size: int) -> None:
        self._files, self._size = files, size
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="decode")  # pillow decodes without the GIL

    def __len__(self) -> int:
        return len(self._files)

    def take(self, numbers: NDArray[np.int64], rng: Generator | None) -> tuple[Pixels, Labels]:
        places = np.full((len(numbers), 3), 0.5) if rng is None else rng.random((len(numbers), 3))
        files = [self._files[number] for number in numbers]
        images = self._pool.map(self._decode, (path for path, _ in files), places, [rng is not None] * len(files))
        return np.stack(list(images)), np.array([label for _, label in files])

    def _decode(self, path: Path, place: NDArray[np.float64], zoom: bool) -> Pixels:
        image = read_image(path)
        side = min(image.size) * (np.sqrt(0.2 + 0.8 * place[2]) if zoom else 0.875)
        left, top = (image.width - side) * place[0], (image.height - side) * place[1]
        return np.asarray(image.resize((self._size, self._size), box=(left, top, left + side, top + side)))


def prefetched(
    batches: Iterable[tuple[ImageSet, NDArray[np.int64], Generator]],
) -> Iterator[tuple[Pixels, Labels, Generator]]:
    """Raw batches, the next one read while the caller computes."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as reader:
        waiting: list[tuple[Future[tuple[Pixels, Labels]], Generator]] = []
        for images, numbers, rng in batches:
            waiting.append((reader.submit(images.take, numbers, rng), rng))
            if len(waiting) > 2:
                future, used = waiting.pop(0)
                yield *future.result(), used
        for future, used in waiting:
            yield *future.result(), used


def augment(pixels: Pixels, rng: Generator, pad: int = 4, flip: bool = True) -> Pixels:
    """Every image shifted by up to `pad` pixels with zeros moved in, and half of them mirrored: one gather."""
    count, height, width, _ = pixels.shape
    padded = np.pad(pixels, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows = rng.integers(0, 2 * pad + 1, (count, 1)) + np.arange(height)
    columns = rng.integers(0, 2 * pad + 1, (count, 1)) + np.arange(width)
    if flip:
        mirrored = rng.random((count, 1)) < 0.5
        columns = np.where(mirrored, columns[:, ::-1], columns)
    result: Pixels = padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return result


def fit(pixels: Pixels, size: int, channels: int) -> Pixels:
    """Images as a network wants them: grey or colour, a border cut or added, or enlarged a whole number of times."""
    if channels == 1 and pixels.shape[3] == 3:
        pixels = pixels.mean(3, keepdims=True).astype(np.uint8)
    if channels == 3 and pixels.shape[3] == 1:
        pixels = np.repeat(pixels, 3, axis=3)
    height, width = pixels.shape[1:3]
    border, odd = divmod(size - height, 2)
    if height == width and not odd and -4 <= border <= 4:
        frame = max(0, border)
        padded = np.pad(pixels, ((0, 0), (frame, frame), (frame, frame), (0, 0))) if frame else pixels
        return padded[:, -border:border, -border:border] if border < 0 else padded
    if height == width and size % height == 0:
        return pixels.repeat(size // height, axis=1).repeat(size // height, axis=2)
    raise DataError(
        f"images of {width}x{height} cannot be fitted to the {size}x{size} of this preset: choose "
        "another preset, or give an image folder with `resize`."
    )


def to_tensor(pixels: Pixels) -> Tensor:
    """Float32, [n, channels, height, width], about zero mean and unit variance."""
    tensor = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).to(torch.float32)
    return tensor.sub_(121.0).div_(64.0)


def _in_memory(layout: str, arrays: Arrays) -> Images:
    train, valid = ArrayImages(arrays.train, arrays.train_labels), ArrayImages(arrays.valid, arrays.valid_labels)
    return Images(layout, train, valid, arrays.classes, arrays.train.shape[1], arrays.train.shape[3])


def _decoded_folder(listed: dict[str, list[tuple[Path, int]]], classes: tuple[str, ...], size: int) -> Arrays:
    return Arrays(*_decoded(listed["train"], size), *_decoded(listed["val"], size), classes=classes)


def _decoded(files: list[tuple[Path, int]], size: int) -> tuple[Pixels, Labels]:
    pixels = np.empty((len(files), size, size, 3), dtype=np.uint8)
    for number, (path, _) in enumerate(files):
        image = read_image(path)
        if image.size != (size, size):
            raise DataError(
                f"{path} is {image.width}x{image.height}, this preset reads {size}x{size}: scale the images, or train "
                "with `resize`, which crops and scales them while it reads."
            )
        pixels[number] = np.asarray(image)
    return pixels, np.array([label for _, label in files])


def _draw_shapes() -> Arrays:
    train, valid = shapes.draw(TRAIN_SHAPES, _SHAPES_SEED), shapes.draw(VALID_SHAPES, _SHAPES_SEED + 1)
    return Arrays(*train, *valid, classes=shapes.NAMES)


_PARTS = ("train", "train_labels", "valid", "valid_labels")


def _cached_arrays(name: str, key: tuple[object, ...], make: Callable[[], Arrays]) -> Arrays:
    """Arrays mapped from the cache: loading costs nothing, and ranks of one machine share the pages."""

    def fill(into: Path) -> None:
        arrays = make()
        for part in _PARTS:
            np.save(into / f"{part}.npy", getattr(arrays, part))
        (into / "classes.txt").write_text("\n".join(arrays.classes), encoding="utf-8")

    folder = cached_folder(name, key, fill)
    parts = {part: np.load(folder / f"{part}.npy", mmap_mode="r") for part in _PARTS}
    return Arrays(**parts, classes=tuple((folder / "classes.txt").read_text(encoding="utf-8").split("\n")))


def _stamp(path: Path) -> tuple[object, ...]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*_batch*") if file.is_file())
    return tuple(fingerprint(file) for file in files)
