"""Published image files: read as they are, refused with a remedy when they are not what they should be."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from oktopk.errors import DataError
from oktopk.workloads.vision.data import find_layout, load_images
from oktopk.workloads.vision.readers import CIFAR_MD5, MNIST_FILES, read_cifar10, read_mnist
from oktopk.workloads.vision.workload import VisionConfig, VisionWorkload


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))


def cifar_batch(seed: int, count: int = 10, **changed: object) -> bytes:
    """A batch as the published files hold it: protocol 2, byte strings, numpy's old module names."""
    rng = np.random.default_rng(seed)
    batch = {
        b"batch_label": b"testing batch",
        b"labels": rng.integers(0, 10, count).tolist(),
        b"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
        b"filenames": [b"leptodactylus_%d.png" % number for number in range(count)],
    }
    batch |= {name.encode(): value for name, value in changed.items()}
    return pickle.dumps(batch, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def cifar_folder(folder: Path, **replaced: bytes) -> Path:
    folder.mkdir()
    for number, name in enumerate(CIFAR_MD5):
        (folder / name).write_bytes(replaced.get(name, cifar_batch(number)))
    return folder


def cifar_archive(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for number, name in enumerate(CIFAR_MD5):
            data = cifar_batch(number)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def test_cifar_folder_and_archive_hold_the_same(tmp_path):
    folder = read_cifar10(cifar_folder(tmp_path / "cifar-10-batches-py"), verify=False)
    archive = read_cifar10(cifar_archive(tmp_path / "cifar.tar.gz"), verify=False)
    parent = read_cifar10(tmp_path, verify=False)
    assert folder.train.shape == (50, 32, 32, 3) and folder.valid.shape == (10, 32, 32, 3)
    for other in (archive, parent):
        np.testing.assert_array_equal(folder.train, other.train)
        np.testing.assert_array_equal(folder.valid_labels, other.valid_labels)
    raw = pickle.loads(cifar_batch(0))[b"data"]
    # The first 1024 bytes of a row are the red channel, row by row.
    np.testing.assert_array_equal(folder.train[3, :, :, 0], raw[3, :1024].reshape(32, 32))


def test_cifar_trains_from_the_cache_the_second_time(tmp_path):
    folder = cifar_folder(tmp_path / "set")
    config = VisionConfig(data=str(folder), batch_size=5, verify=False)
    first = next(VisionWorkload(config, 0).batches(0, 0, 2))
    assert list((tmp_path / "cache").glob("cifar10-*"))
    again = next(VisionWorkload(config, 0).batches(0, 0, 2))
    assert first[0].shape == (5, 3, 32, 32) and (first[0] == again[0]).all()


def test_cifar_checksums_are_verified(tmp_path):
    folder = cifar_folder(tmp_path / "set")
    with pytest.raises(DataError, match=r"data_batch_1 .*published md5 c99cafc1.*verify"):
        read_cifar10(folder)


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_a_pickle_that_calls_something_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = cifar_folder(tmp_path / "set", data_batch_2=pickle.dumps({b"data": Bomb(), b"labels": []}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_2 asks for .* it is not run"):
        read_cifar10(folder, verify=False)
    assert not (tmp_path / "exploded").exists()


OBJECTS = pickle.dumps({b"data": np.array([[object]]), b"labels": [0]}, protocol=2)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("data_batch_3", cifar_batch(2)[:5000], "data_batch_3 is truncated"),
        ("data_batch_3", b"", "data_batch_3 is truncated"),
        ("data_batch_3", b"not a pickle", "data_batch_3 is truncated or no CIFAR-10 batch"),
        ("data_batch_3", OBJECTS, "data_batch_3"),
        ("test_batch", cifar_batch(5, labels=[0, 1, 2, 3, 4, 5, 6, 7, 8, 10]), "labels reach from 0 to 10"),
        ("test_batch", cifar_batch(5, labels=[1, 2]), "2 labels where 32x32"),
        ("test_batch", cifar_batch(5, data=np.zeros((10, 64 * 64 * 3), np.uint8)), r"\(10, 12288\).*32x32 colour"),
    ],
)
def test_damaged_batches_are_named_with_a_remedy(tmp_path, name, data, message):
    folder = cifar_folder(tmp_path / "set", **{name: data})
    with pytest.raises(DataError, match=message) as caught:
        read_cifar10(folder, verify=False)
    assert str(folder) in str(caught.value)


def test_other_archives_and_missing_batches_are_named(tmp_path):
    other = tmp_path / "other.tar.gz"
    with tarfile.open(other, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("readme.html"))
    with pytest.raises(DataError, match=r"other.tar.gz lacks data_batch_1, .*cifar-10-python.tar.gz"):
        load_images(str(other), 32, False, True)
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(cifar_archive(tmp_path / "whole.tar.gz").read_bytes()[:900])
    with pytest.raises(DataError, match=r"broken.tar.gz cannot be read as an archive"):
        load_images(str(broken), 32, False, True)
    with pytest.raises(DataError, match="does not exist"):
        load_images(str(tmp_path / "nowhere"), 32, False, True)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def mnist_folder(folder: Path, packed: bool, **replaced: bytes) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (30, 28, 28)), np.arange(30) % 10, rng.integers(0, 256, (8, 28, 28)), np.arange(8)]
    for name, array in zip(MNIST_FILES, arrays, strict=True):
        data = replaced.get(name.replace("-", "_"), idx(array))
        (folder / (name + ".gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_trains_its_own_network_and_the_colour_ones(tmp_path, packed):
    folder = mnist_folder(tmp_path / "mnist", packed)
    assert find_layout(folder) == "MNIST"
    for preset, shape in (("mnistnet", (5, 1, 28, 28)), ("small", (5, 3, 32, 32))):
        workload = VisionWorkload(VisionConfig(preset=preset, data=str(folder), batch_size=5), 0)
        images, labels = next(workload.batches(0, 0, 1))
        assert images.shape == shape
        assert workload.loss(workload.model(), (images, labels)).item() > 0


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("train_images_idx3_ubyte", idx(np.zeros((30, 28, 28)))[:-5], "truncated"),
        ("train_images_idx3_ubyte", b"\x89PNG....", "no IDX file"),
        ("train_labels_idx1_ubyte", idx(np.zeros(29)), "30 images, but train-labels-idx1-ubyte has 29"),
        ("t10k_labels_idx1_ubyte", idx(np.full(8, 11)), "labels reach from 11 to 11"),
    ],
)
def test_damaged_mnist_files_are_named(tmp_path, name, data, message):
    folder = mnist_folder(tmp_path / "mnist", False, **{name: data})
    with pytest.raises(DataError, match=message) as caught:
        read_mnist(folder)
    assert str(folder) in str(caught.value)


def image_folder(root: Path, size: tuple[int, int] = (32, 32)) -> Path:
    for part, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(("ant", "bee")):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", size, (100 * label, 20 * number, 0)).save(root / part / name / f"{number}.png")
    return root


def test_an_image_folder_of_the_right_size_is_read_into_memory(tmp_path):
    images = load_images(str(image_folder(tmp_path / "set")), 32, resize=False, verify=True)
    assert images.classes == ("ant", "bee") and len(images.train) == 12 and len(images.valid) == 4
    pixels, labels = images.train.take(np.array([0, 11]), None)
    assert labels.tolist() == [0, 1] and pixels[1, 0, 0].tolist() == [100, 100, 0]


def test_images_of_another_size_are_an_error_that_offers_resize_and_resize_streams_them(tmp_path):
    folder = image_folder(tmp_path / "set", (50, 40))
    with pytest.raises(DataError, match=r"0.png is 50x40, this preset reads 32x32.*resize"):
        load_images(str(folder), 32, resize=False, verify=True)
    workload = VisionWorkload(VisionConfig(data=str(folder), resize=True, batch_size=3), 0)
    batches = list(workload.batches(0, 1, 2))
    again = list(VisionWorkload(workload.config, 0).batches(0, 1, 2, start=1))
    assert len(batches) == 2 and batches[0][0].shape == (3, 3, 32, 32)
    assert (batches[1][0] == again[0][0]).all()
    summary = workload.summarize(workload.evaluate(workload.model(), 0, 1))
    assert set(summary) == {"loss", "accuracy"}  # two classes have no top five


def test_broken_and_missing_images_are_named(tmp_path):
    folder = image_folder(tmp_path / "set")
    (folder / "train" / "ant" / "3.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(DataError, match=r"3.png is not a readable image"):
        load_images(str(folder), 32, resize=False, verify=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="train/CLASS/IMAGES"):
        load_images(str(tmp_path / "empty"), 32, resize=False, verify=True)
    image_folder(tmp_path / "new")
    (tmp_path / "new" / "val" / "wasp").mkdir()
    with pytest.raises(DataError, match="classes that train has not: wasp"):
        load_images(str(tmp_path / "new"), 32, resize=False, verify=True)
