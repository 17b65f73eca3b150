"""The data sets that the program draws, without a download: digits, grey or in two colours."""

from collections.abc import Sequence
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
    "mono": [
        "DejaVuSansMono",
        "DejaVuSansMono-Bold",
        "DejaVuSansMono-Oblique",
        "DejaVuSansMono-BoldOblique",
    ],
    "stix": ["STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"],
    "computer modern": ["cmr10", "cmb10", "cmss10", "cmtt10"],
}


def glyphs(n_train: int = 12_000, n_test: int = 2_000, seed: int = 0) -> dict:
    """The ten digits in matplotlib's fonts, 28x28, grey; the font family is the domain.

    Face, digit, size, position, slant, stroke, ink and noise are random for each sample. A `cnn`
    trained on all samples together still misclassifies a few percent. The same seed gives the same
    bytes.
    """
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    faces = [folder / f"{face}.ttf" for family in FONTS.values() for face in family]
    family_of = torch.tensor([f for f, family in enumerate(FONTS.values()) for _ in family])
    stencils = [_stencil(str(face), digit) for face in faces for digit in range(10)]
    stencils = torch.stack(stencils)  # [faces*10, 56, 56]
    strokes = torch.stack([F.max_pool2d(stencils, k, stride=1, padding=k // 2) for k in (1, 3, 5)])

    g = torch.Generator().manual_seed(seed)
    n = n_train + n_test
    face, digit, stroke = (
        torch.randint(high, (n,), generator=g) for high in (len(faces), 10, len(strokes))
    )
    scale, shear, dx, dy, ink, noise = torch.rand(6, n, generator=g)
    scale, shear = 0.75 + 0.5 * scale, 0.6 * (shear - 0.5)
    dx, dy = 0.4 * (dx - 0.5), 0.4 * (dy - 0.5)
    affine = torch.stack([scale, shear, dx, 0 * dx, scale, dy], dim=1).view(n, 2, 3)
    x = torch.empty(n, 1, 28, 28, dtype=torch.uint8)
    for i in torch.arange(n).split(2000):
        drawn = strokes[stroke[i], face[i] * 10 + digit[i]].unsqueeze(1)
        grid = F.affine_grid(affine[i], [len(i), 1, 56, 56], align_corners=False)
        image = F.avg_pool2d(F.grid_sample(drawn, grid, align_corners=False), 2)
        image = image * (1 - 0.8 * ink[i].view(-1, 1, 1, 1) ** 3)
        grain = torch.randn(image.shape, generator=g)
        image = image + 0.5 * noise[i].view(-1, 1, 1, 1) ** 4 * grain
        x[i] = (image.clamp(0, 1) * 255).to(torch.uint8)
    return {
        "x": x, "y": digit, "train": torch.arange(n_train), "test": torch.arange(n_train, n),
        "classes": [str(d) for d in range(10)], "domain": family_of[face], "domains": list(FONTS),
    }  # fmt: skip


def coloured(agreement: Sequence[float], grey: bool = False) -> dict:
    """Glyphs of 14x14 pixels in red or green, in three domains: two for training, one for testing.

    agreement  for each domain, how often the colour agrees with the label
    grey       leaves the colour out

    Class 0 has the digits 0 and 8, class 1 has 1 and 7, but a quarter of the labels is wrong. So a
    model that sees the shape alone is right in up to 75 %, in every domain. The test set `neutral`
    has each test image once in red and once in green, so there a model that sees the colour alone
    is right in 50 %. This is the idea of Arjovsky et al. 2019 (ColoredMNIST).
    """
    g, drawn = torch.Generator().manual_seed(1), glyphs(9_000, 4_000)
    digit, is_test = drawn["y"], torch.zeros(13_000, dtype=torch.bool)
    is_test[drawn["test"]] = True
    used = torch.isin(digit, torch.tensor([0, 8, 1, 7]))
    digit, is_test = digit[used], is_test[used]
    ink = F.avg_pool2d(drawn["x"][used].float(), 2).squeeze(1).to(torch.uint8)
    n = len(ink)
    wrong = torch.rand(n, generator=g) < 0.25
    y = torch.isin(digit, torch.tensor([1, 7])).long() ^ wrong.long()
    domain = torch.where(is_test, 2, torch.randint(2, (n,), generator=g))
    misleads = torch.rand(n, generator=g) >= torch.tensor(agreement)[domain]
    colour = y ^ misleads.long()

    test = torch.nonzero(is_test).flatten()
    red, green, nowhere = torch.zeros_like(test), torch.ones_like(test), torch.full_like(test, -1)
    ink, y = torch.cat([ink, ink[test], ink[test]]), torch.cat([y, y[test], y[test]])
    colour, domain = torch.cat([colour, red, green]), torch.cat([domain, nowhere, nowhere])
    x = torch.zeros(len(ink), 3, 14, 14, dtype=torch.uint8)
    x[torch.arange(len(ink)), colour] = ink
    if grey:
        x = ink.unsqueeze(1).repeat(1, 3, 1, 1)
    return {
        "x": x, "y": y, "train": torch.nonzero(~is_test).flatten(), "test": test,
        "classes": ["0 8", "1 7"], "domain": domain, "domains": ["one", "two", "test"],
        "extra": {"neutral": torch.arange(n, len(ink))},
    }  # fmt: skip


def _stencil(face: str, digit: int) -> Tensor:
    """One digit in one face, float32 [56, 56] in 0..1, twice as large as in the final images."""
    image = Image.new("L", (56, 56))
    ImageDraw.Draw(image).text((28, 28), str(digit), 255, ImageFont.truetype(face, 44), anchor="mm")
    return torch.from_numpy(np.array(image)).float() / 255
