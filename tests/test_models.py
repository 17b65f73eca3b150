import argparse
import copy

import pytest
import torch
import torch.nn as nn
import torchvision

from common import UserError
from common.models import GroupNorm, build


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("cnn", 1, 28), ("convnet", 1, 28), ("resblocks", 1, 28), ("resnet18", 3, 32)],
)
def test_a_model_is_its_classifier_after_its_features(name, channels, size):
    model = build(name, (channels, size, size), 7, width=0.125).eval()
    x = torch.rand(2, channels, size, size)
    assert model(x).shape == (2, 7)
    assert torch.equal(model(x), model.classifier(model.features(x)))


def test_mcmahans_cnn_has_as_many_parameters_as_their_paper_says():
    assert parameters(build("cnn", (1, 28, 28), 10)) == 1_663_370


def test_guos_convnet():
    convolutions = 9 * (64 + 64 * 128 + 128 * 128 + 128 * 128) + 64 + 3 * 128
    norms = 2 * (64 + 3 * 128)
    model = build("convnet", (1, 28, 28), 10)
    assert parameters(model) == convolutions + norms + 128 * 10 + 10
    assert model.features[3].stride == (2, 2)


def test_group_norm_under_bfloat16_is_that_of_float32():
    x = torch.randn(3, 8, 5, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = GroupNorm(2, 8)(x)
    groups = x.double().view(3, 2, -1)
    expected = (groups - groups.mean(2, keepdim=True)) / groups.std(2, correction=0, keepdim=True)
    assert torch.allclose(
        found.double(), expected.view(x.shape), atol=1e-4
    )  # bfloat16 would be off by 1e-2


def test_without_pretrained_weights_no_sample_sees_the_rest_of_its_batch():
    model = build("resnet18", (3, 32, 32), 5)
    x = torch.rand(4, 3, 32, 32)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)


def with_other_statistics(net):
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return net


NORMALISE = torchvision.transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.mark.parametrize("channels", [1, 3])
def test_pretrained_weights_give_torchvisions_features_with_frozen_statistics(tmp_path, channels):
    theirs = with_other_statistics(torchvision.models.resnet18())
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = build("resnet18", (channels, 64, 64), 5, pretrained=str(tmp_path / "weights.pth"))
    ours.features[1].fc = theirs.fc = nn.Identity()
    image = torch.rand(2, channels, 64, 64)
    normalised = NORMALISE(image.expand(2, 3, 64, 64))
    found = ours.train().features(image * 2 - 1)
    assert torch.allclose(found, theirs.eval()(normalised), atol=1e-4)


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "resnet50"])
def test_images_that_are_too_small_for_a_network_are_refused(name):
    with pytest.raises(UserError, match="take another model, or larger images"):
        build(name, (3, 16, 16), 5)


@pytest.mark.parametrize(("size", "places"), [(96, 3), (224, 7)])
def test_a_resnet_that_is_not_pooled_ends_with_a_map(size, places):
    model = build("resnet18", (3, size, size), 5, pooled=False).eval()
    x = torch.rand(1, 3, size, size)
    z = model.features(x)
    assert z.shape == (1, model.dim, places, places) and model.dim == 512
    assert torch.equal(model.classifier(z.flatten(2)), model(x)), "as UEFL passes tokens"
    layers = [type(layer) for layer in model.classifier]
    assert layers == [nn.Flatten, nn.Dropout, nn.Linear, nn.GELU, nn.Dropout, nn.Linear]


def test_the_mean_of_the_map_is_torchvisions_pooled_vector(tmp_path):
    theirs = with_other_statistics(torchvision.models.resnet18())
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = build("resnet18", (3, 64, 64), 5, pretrained=str(tmp_path / "weights.pth"), pooled=False)
    theirs.fc = nn.Identity()
    image = torch.rand(2, 3, 64, 64)
    found = ours.features(image * 2 - 1).mean((2, 3))
    assert torch.allclose(found, theirs.eval()(NORMALISE(image)), atol=1e-4)


@pytest.mark.parametrize("key", ["state_dict", "model", None])
def test_weights_may_stand_in_a_checkpoint_of_a_parallel_run_on_other_classes(tmp_path, key):
    theirs = torchvision.models.resnet18(num_classes=7)
    state = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({key: state, "epoch": 90} if key else state, tmp_path / "weights.pth")
    ours = build("resnet18", (3, 32, 32), 5, pretrained=str(tmp_path / "weights.pth"))
    found = ours.features[1].state_dict()
    for name, tensor in theirs.state_dict().items():
        assert name.startswith("fc.") or torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: {f"body.{k}": state[k] for k in state}, 'Missing key(s) in state_dict: "c'),
        (lambda state: {**state, "more": torch.zeros(1)}, 'Unexpected key(s) in state_dict: "m'),
        (lambda state: {**state, "conv1.weight": torch.zeros(64, 1, 7, 7)}, "[64, 1, 7, 7]"),
        (lambda state: {"model": state, "flags": argparse.Namespace()}, "(UnpicklingError)"),
        (lambda state: [state], "(AttributeError)"),
    ],
)
def test_one_line_says_why_a_file_of_weights_does_not_fit(tmp_path, change, says):
    file = str(tmp_path / "weights.pth")
    torch.save(change(torchvision.models.resnet18().state_dict()), file)
    with pytest.raises(UserError) as e:
        build("resnet18", (3, 32, 32), 5, pretrained=file)
    text = str(e.value)
    assert f"cannot be loaded from {file} (" in text and says in text
    assert "network" not in text and len(text.splitlines()) == 1


def test_a_download_that_fails_says_what_to_do(monkeypatch):
    def fails(*args, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", fails)
    with pytest.raises(UserError, match=r"\(no route\): with no network, .*/resnet18-.*pth"):
        build("resnet18", (3, 32, 32), 5, pretrained="imagenet")


def test_vgg16_has_batch_norm_and_the_parameters_of_zhangs_table_11(tmp_path, monkeypatch):
    theirs = with_other_statistics(torchvision.models.vgg16_bn())
    theirs.avgpool = theirs.classifier = nn.Identity()  # 124 million parameters
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    fresh = copy.deepcopy(theirs)
    for values in fresh.state_dict().values():
        values.zero_()
    monkeypatch.setattr(torchvision.models, "vgg16_bn", lambda: fresh)
    ours = build("vgg16", (3, 32, 32), 10, pretrained=str(tmp_path / "weights.pth"))
    assert f"{parameters(ours) / 1e6:.3f}" == "14.991"
    image = torch.rand(4, 3, 32, 32)
    for training in (False, True):  # in training, its batch norm looks at the batch
        found = ours.train(training).features(image * 2 - 1)
        expected = theirs.features.train(training)(NORMALISE(image))
        assert torch.allclose(found, expected, atol=1e-4)
