"""The data sets that the program draws, without a download: digits, grey or in two colours."""

from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

FONTS = {  # family -> faces; all of them come with matplotlib
    "sans": ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"],
    "serif": ["DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"],
    "mono": [f"DejaVuSansMono{face}" for face in ("", "-Bold", "-Oblique", "-BoldOblique")],
    "stix": ["STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"],
    "computer modern": ["cmr10", "cmb10", "cmss10", "cmtt10"],
}
AGREEMENT = [1.0, 0.6, 0.1]  # how often the colour agrees with the label in each domain of colours


def glyphs(n_train: int = 12_000, n_test: int = 2_000, seed: int = 0) -> dict:
    """The ten digits in matplotlib's fonts, 28x28, grey; the font family is the domain.

    Face, digit, size, position, slant, stroke, ink and noise are random for each sample. A `cnn`
    trained on all samples together still misclassifies a few percent. The same seed gives the same
    bytes, if Pillow finds the library FriBiDi, as most systems have it. Without it, text is laid
    out in another way, and a fifth of the images differ slightly.
    """
    stencils, family_of = [], []
    for d, faces in enumerate(FONTS.values()):
        for name in faces:
            stencils += [_stencil(name, c) for c in range(10)]
            family_of.append(d)
    thin = torch.stack(stencils).view(-1, 10, 56, 56)
    bold = F.max_pool2d(thin, 3, stride=1, padding=1)
    bolder = F.max_pool2d(thin, 5, stride=1, padding=2)
    strokes = torch.stack([thin, bold, bolder])  # [3, faces, digits, 56, 56]

    n = n_train + n_test
    g = torch.Generator().manual_seed(seed)
    face = torch.randint(len(family_of), (n,), generator=g)
    digit = torch.randint(10, (n,), generator=g)
    stroke = torch.randint(len(strokes), (n,), generator=g)
    size, slant, right, down = torch.rand(4, n, generator=g)
    ink, noise = torch.rand(2, n, 1, 1, 1, generator=g)
    size = 0.75 + 0.5 * size
    slant = 0.6 * (slant - 0.5)
    right = 0.4 * (right - 0.5)
    down = 0.4 * (down - 0.5)
    zero = torch.zeros(n)  # a pixel at (a, b) is read at affine @ (a, b, 1)
    affine = torch.stack([size, slant, right, zero, size, down], dim=1).view(n, 2, 3)

    x = torch.empty(n, 1, 28, 28, dtype=torch.uint8)
    for i in torch.arange(n).split(2000):
        large = strokes[stroke[i], face[i], digit[i]].unsqueeze(1)
        grid = F.affine_grid(affine[i], large.shape, align_corners=False)
        moved = F.grid_sample(large, grid, align_corners=False)
        image = F.avg_pool2d(moved, 2)  # 28x28
        brightness = 1 - 0.8 * ink[i] ** 3
        strength = 0.5 * noise[i] ** 4
        grain = torch.randn(image.shape, generator=g)
        image = image * brightness + strength * grain
        x[i] = (image.clamp(0, 1) * 255).to(torch.uint8)
    return {
        "x": x,
        "y": digit,
        "train": torch.arange(n_train),
        "test": torch.arange(n_train, n),
        "classes": [str(c) for c in range(10)],
        "domain": torch.tensor(family_of)[face],
        "domains": list(FONTS),
    }


def coloured() -> dict:
    """Glyphs of 14x14 pixels in red or green, in three domains: two for training, one for testing.

    Class 0 has the digits 0 and 8, class 1 has 1 and 7, but a quarter of the labels is wrong. So a
    model that sees the shape alone is right in up to 75 %, in every domain. The test set `neutral`
    has each test image once in red and once in green, so there a model that sees the colour alone
    is right in 50 %. This is the idea of Arjovsky et al. 2019 (ColoredMNIST).
    """
    drawn = glyphs(9_000, 4_000)
    used = torch.isin(drawn["y"], torch.tensor([0, 8, 1, 7]))
    y = torch.isin(drawn["y"][used], torch.tensor([1, 7])).long()
    ink = F.avg_pool2d(drawn["x"][used].float(), 2).squeeze(1).to(torch.uint8)  # [n, 14, 14]
    n = len(y)
    n_train = int(used[drawn["train"]].sum())
    train, test = torch.arange(n).tensor_split([n_train])

    g = torch.Generator().manual_seed(1)
    is_wrong = torch.rand(n, generator=g) < 0.25
    y = y ^ is_wrong
    domain = torch.randint(2, (n,), generator=g)
    domain[test] = 2
    misleads = torch.rand(n, generator=g) >= torch.tensor(AGREEMENT)[domain]
    colour = y ^ misleads

    # The test images follow twice more, in red and then in green, and belong to no domain
    rows = torch.cat([torch.arange(n), test, test])
    ink, y = ink[rows], y[rows]
    colour = torch.cat([colour, torch.zeros_like(test), torch.ones_like(test)])
    domain = torch.cat([domain, torch.full((2 * len(test),), -1)])
    x = torch.zeros(len(rows), 3, 14, 14, dtype=torch.uint8)
    x[torch.arange(len(rows)), colour] = ink
    return {
        "x": x,
        "y": y,
        "train": train,
        "test": test,
        "classes": ["0 or 8", "1 or 7"],
        "domain": domain,
        "domains": ["one", "two", "test"],
        "extra": {"neutral": torch.arange(n, len(rows))},
    }


def _stencil(face: str, digit: int) -> Tensor:
    """One digit in one face, float32 [56, 56] in 0..1, twice as large as in the final images."""
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    font = ImageFont.truetype(str(file), size=44)
    image = Image.new("L", (56, 56))
    ImageDraw.Draw(image).text((28, 28), str(digit), fill=255, font=font, anchor="mm")
    return torch.from_numpy(np.array(image)).float() / 255
