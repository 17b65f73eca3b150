"""The controls that change the data: each diff does what its paragraph says."""

import os
import runpy
import shutil
import subprocess

import pytest
import torch
from helpers import ROOT, make_tiny

from common.glyphs import coloured


@pytest.fixture
def patched(tmp_path):
    """patched(name, file): what is defined in this file of common/, after this diff."""

    def load(name, file):
        (tmp_path / "common").mkdir()
        shutil.copy(ROOT / "common" / file, tmp_path / "common")
        alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
        diff = ROOT / f"results/controls/{name}.diff"
        subprocess.run(["git", "apply", diff], cwd=tmp_path, env=alone, check=True)
        return runpy.run_path(str(tmp_path / "common" / file))

    return load


def test_in_the_control_of_colours_both_clients_trust_the_colour_equally(patched):
    data = patched("colours-control", "glyphs.py")["coloured"]()
    green = data["x"].amax((2, 3))[:, 1] > 0
    for d, expected in enumerate((0.8, 0.8, 0.1)):
        here = data["domain"] == d
        share = (green == data["y"])[here].double().mean()
        assert abs(share - expected) < 4 * (expected * (1 - expected) / here.sum()) ** 0.5
    assert torch.equal(data["y"], coloured()["y"])


def test_grey_digits_have_the_shapes_of_the_coloured_ones_and_no_colour(patched):
    x, in_colour = patched("colours-grey", "glyphs.py")["coloured"]()["x"], coloured()["x"]
    assert torch.equal(x, in_colour.amax(1, keepdim=True).expand_as(x))


def test_twins_are_two_clients_for_each_rare_class(patched):
    tiny = make_tiny(n_train=1200)
    y = torch.arange(len(tiny.y)) % 10
    data = type(tiny)("ten", tiny.x, y, tiny.train, tiny.test, list("0123456789"))
    clients = patched("twins", "splits.py")["make_clients"](data, 3, "rare", clients=20)
    held = [{*y[samples].tolist()} for samples in clients.train]
    assert [held.count({c}) for c in (7, 8, 9)] == [2, 2, 2]
    assert sum(classes <= {*range(7)} for classes in held) == 14
    assert clients.groups == ["one class" if len(s) == 1 else "more classes" for s in held]
