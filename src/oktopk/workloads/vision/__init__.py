"""Image classification: VGG, ResNet, AlexNet on CIFAR-10, MNIST, image folders or the embedded shapes."""
