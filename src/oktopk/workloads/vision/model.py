"""The networks: VGG for 32x32 images, residual networks, AlexNet, two small ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

VGG_LAYOUTS: dict[str, tuple[int | str, ...]] = {  # channels of each convolution; M halves the image
    "vgg11": (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    "vgg16": (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
    "vgg19": (64, 64, "M", 128, 128, "M", *[256] * 4, "M", *[512] * 4, "M", *[512] * 4, "M"),
    "small": (24, "M", 48, "M", 96, "M", 96),
}


class Vgg(nn.Module):
    """Convolutions with batch norm, the mean over what is left of the image, one linear layer."""

    def __init__(self, layout: Sequence[int | str], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for item in layout:
            if isinstance(item, int):
                layers += [nn.Conv2d(width, item, 3, padding=1), nn.BatchNorm2d(item), nn.ReLU(inplace=True)]
                width = item
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, classes)
        _initialise_(self)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return result


class CifarResNet(nn.Module):
    """ResNet-20/56/110 of He et al. (2015), section 4.2: three stages of 16, 32 and 64 channels."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        widths = [16] * blocks + [32] * blocks + [64] * blocks
        self.stem = nn.Sequential(_conv(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*[_BasicBlock(before, after) for before, after in pairwise([16, *widths])])
        self.classifier = nn.Linear(64, classes)
        _initialise_(self)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.blocks(self.stem(images)).mean((2, 3)))
        return result


class _BasicBlock(nn.Module):
    """Two convolutions beside a shortcut without parameters: subsampled, new channels zero."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self._stride, self._new = after // before, after - before
        self.first, self.first_norm = _conv(before, after, 3, self._stride), nn.BatchNorm2d(after)
        self.second, self.second_norm = _conv(after, after, 3), nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = pad(x[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, 0, self._new))
        return relu(self.second_norm(self.second(relu(self.first_norm(self.first(x))))) + shortcut)


class ResNet50(nn.Module):
    """ResNet-50 for ImageNet, the stride in the 3x3 convolution."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        before = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(_Bottleneck(before, width, stride if number == 0 else 1))
                before = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(before, classes)
        _initialise_(self)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.blocks(self.stem(images)).mean((2, 3)))
        return result


class _Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.narrow = nn.Sequential(_conv(before, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.middle = nn.Sequential(_conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.widen = nn.Sequential(_conv(width, after, 1), nn.BatchNorm2d(after))
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(_conv(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.widen(self.middle(self.narrow(x))) + self.shortcut(x))


class AlexNet(nn.Module):
    """The single-column AlexNet for 224x224 images (Krizhevsky, 2014)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True),
            nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return result


class MnistNet(nn.Module):
    """Two convolutions and two linear layers for 28x28 grey images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True),
            nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(320, 50), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(50, classes))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return result


def build(name: str, classes: int) -> nn.Module:
    """The network of a preset."""
    if name in VGG_LAYOUTS:
        return Vgg(VGG_LAYOUTS[name], classes)
    if name in ("resnet20", "resnet56", "resnet110"):
        return CifarResNet(int(name.removeprefix("resnet")), classes)
    return {"resnet50": ResNet50, "alexnet": AlexNet, "mnistnet": MnistNet}[name](classes)


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)


def _initialise_(model: nn.Module) -> None:
    """He's initialisation; a shallow default makes VGG-16 start too slowly."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
