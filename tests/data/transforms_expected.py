"""Prints transforms_expected.inc: what torchvision's transforms yield, of PyTorch's operations alone.

Needs a Python with torch:  python3 transforms_expected.py > transforms_expected.inc
"""

import math

import torch
import torch.nn.functional as F


def image(channels, height, width, dtype=torch.float32):
    values = torch.arange(channels * height * width) * 37 % 256
    values = values.view(channels, height, width)
    return values.to(dtype) if dtype == torch.uint8 else values.to(dtype) / 255


def show(name, result):
    values = ", ".join(f"{value:.7g}" for value in result.flatten().tolist())
    shape = ", ".join(str(extent) for extent in result.shape)
    print(f'{{"{name}", {{{{{shape}}}, {{{values}}}}}}},')


def resize(x, size, antialias=True):
    floating = x.is_floating_point()
    y = F.interpolate(x[None].float(), size=size, mode="bilinear", align_corners=False, antialias=antialias)[0]
    return y if floating else y.round().to(x.dtype)


def padded_crop(x, size, padding, generator, mode="constant"):
    x = F.pad(x[None], [padding] * 4, mode=mode)[0]
    height, width = x.shape[-2:]
    top = left = 0
    if height > size:
        top = int(torch.randint(0, height - size + 1, size=(), generator=generator))
    if width > size:
        left = int(torch.randint(0, width - size + 1, size=(), generator=generator))
    return x[..., top : top + size, left : left + size]


def rectangle(height, width, scale, ratio, generator):
    area = height * width
    log_ratio = torch.log(torch.tensor(ratio))
    for _ in range(10):
        target = area * torch.empty(1).uniform_(scale[0], scale[1], generator=generator).item()
        low, high = log_ratio.tolist()
        aspect = torch.exp(torch.empty(1).uniform_(low, high, generator=generator)).item()
        w = int(round(math.sqrt(target * aspect)))
        h = int(round(math.sqrt(target / aspect)))
        if 0 < w <= width and 0 < h <= height:
            top = torch.randint(0, height - h + 1, size=(1,), generator=generator).item()
            left = torch.randint(0, width - w + 1, size=(1,), generator=generator).item()
            return top, left, h, w
    in_ratio = width / height
    w, h = width, height
    if in_ratio < min(ratio):
        h = int(round(w / min(ratio)))
    elif in_ratio > max(ratio):
        w = int(round(h * max(ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def resized_crop(x, size, scale, ratio, generator):
    top, left, height, width = rectangle(*x.shape[-2:], scale, ratio, generator)
    return resize(x[..., top : top + height, left : left + width], [size, size])


# With torchvision's operations: add with an alpha may round once, where a product and a sum round twice.
def grayscale(x):
    r, g, b = x.unbind(-3)
    grey = r.mul(0.2989).add(g, alpha=0.587).add(b, alpha=0.114).unsqueeze(-3)
    return grey if x.is_floating_point() else grey.floor()


def clamp(values, dtype):
    return values.clamp(0, 1.0 if dtype.is_floating_point else 255.0).to(dtype)


def blend(a, b, factor):
    return clamp(a.mul(factor).add(b, alpha=1 - factor), a.dtype)


def brightness(x, factor):
    return clamp(x.mul(factor), x.dtype)


def contrast(x, factor):
    return blend(x, grayscale(x).mean(dim=(-3, -2, -1), keepdim=True), factor)


def saturation(x, factor):
    return blend(x, grayscale(x), factor)


def jitter(x, values, generator):
    order = torch.randperm(4, generator=generator)
    factors = [torch.empty(1).uniform_(max(0.0, 1 - v), 1 + v, generator=generator).item() for v in values]
    for i in order.tolist():
        if i < 3:
            x = (brightness, contrast, saturation)[i](x, factors[i])
    return x


def main():
    print(f"// Made by transforms_expected.py with PyTorch {torch.__version__}.")
    print("// name; shape and values")
    for dtype, name in ((torch.float32, "float"), (torch.uint8, "byte")):
        x = image(3, 7, 9, dtype)
        show(f"resize {name} smaller", resize(x, [4, 5]))
        show(f"resize {name} larger", resize(image(1, 3, 4, dtype), [5, 7]))
        show(f"resize {name} shorter side", resize(image(1, 7, 9, dtype), [3, int(3 * 9 / 7)]))
        show(f"resize {name} aliased", resize(x, [4, 5], antialias=False))
        show(f"brightness {name}", brightness(x, 1.3))
        show(f"contrast {name}", contrast(x, 0.4))
        show(f"saturation {name}", saturation(x, 1.7))
    # Eight values differ if a product and a sum round twice.
    show("saturation rounded down", saturation(image(3, 8, 8, torch.uint8), 0.1))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = image(1, 6, 6)
        show(f"random_crop {seed}", padded_crop(x, 6, 2, generator))
        show(f"random_crop again {seed}", padded_crop(x, 6, 2, generator, "reflect"))
        tall = image(1, 7, 4)
        show(f"random_crop of one side {seed}", padded_crop(tall, 4, 0, generator))
        flips = [float(torch.rand(1, generator=generator) < 0.3) for _ in range(20)]
        show(f"flips {seed}", torch.tensor(flips))
        scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
        x = image(1, 11, 8)
        for i in range(2):
            show(f"random_resized_crop {seed} {i}", resized_crop(x, 4, scale, ratio, generator))
        # None of the ten fits: the crop is in the middle.
        show(f"random_resized_crop wide {seed}", resized_crop(image(1, 3, 11), 4, (1.0, 1.0), (0.5, 2.0), generator))
        show(f"random_resized_crop tall {seed}", resized_crop(image(1, 11, 3), 4, (1.0, 1.0), (0.5, 2.0), generator))
        for dtype, name in ((torch.float32, "float"), (torch.uint8, "byte")):
            show(f"color_jitter {name} {seed}", jitter(image(3, 3, 4, dtype), (0.4, 0.5, 1.6), generator))


if __name__ == "__main__":
    main()
