import copy
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision

from common import UserError
from common.models import GroupNorm, build


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_a_resnet18_without_pretrained_weights_answers_each_image_alone():
    """Also in training, because it has group norm."""
    model, x = build("resnet18", (3, 32, 32), 7), torch.rand(2, 3, 32, 32)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)


def test_the_cnn_has_as_many_parameters_as_its_paper_says():
    assert parameters(build("cnn", (1, 28, 28), 10)) == 1_663_370


def test_convnet_is_the_one_of_fediirs_paper_by_hand():
    model, images = build("convnet", (1, 28, 28), 10), torch.rand(2, 1, 28, 28)
    weights, expected, channels = model.features.parameters(), images, []
    for stride in (1, 2, 1, 1):
        expected = F.conv2d(expected, next(weights), next(weights), stride, padding=1).relu()
        expected = F.group_norm(expected, 8, next(weights), next(weights))
        channels.append(expected.shape[1])
    assert channels == [64, 128, 128, 128]
    assert torch.allclose(model.features(images), expected.mean((2, 3)), atol=1e-5)


def test_resnet18_for_cifar_is_torchvisions_with_another_stem():
    """For one batch, in training."""
    ours, images = build("resnet18-cifar", (3, 32, 32), 10), torch.rand(4, 3, 32, 32)
    norm = partial(nn.GroupNorm, 8)
    theirs = torchvision.models.resnet18(num_classes=10, norm_layer=norm)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values())))
    assert parameters(ours) == 11_173_962
    assert torch.allclose(ours(images), theirs(images), atol=1e-4)
    tokens = build("resnet18-cifar", (3, 32, 32), 10, width=0.25, pooled=False).features(images)
    assert tokens.shape == (4, 128, 4, 4)


def test_group_norm_under_bfloat16_is_that_of_float32():
    x = torch.randn(3, 8, 5, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = GroupNorm(2, 8)(x)
    expected = F.group_norm(x.double(), 2)
    assert torch.allclose(found.double(), expected, atol=1e-4)  # bfloat16 would be off by 1e-2


def with_other_statistics(net):
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return net


NORMALISE = torchvision.transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.mark.parametrize(("key", "channels"), [("state_dict", 1), ("model", 3), (None, 3)])
def test_pretrained_weights_give_torchvisions_features_with_frozen_statistics(
    tmp_path, key, channels
):
    """The file may be a checkpoint of a run on other classes. UEFL takes the map, not its mean."""
    theirs, file = with_other_statistics(torchvision.models.resnet18(num_classes=7)), tmp_path / "w"
    torch.save({key: theirs.state_dict(), "epoch": 90} if key else theirs.state_dict(), file)
    theirs.fc, image = nn.Identity(), torch.rand(2, channels, 64, 64)
    expected = theirs.eval()(NORMALISE(image.expand(2, 3, 64, 64)))
    for pooled in (True, False):
        ours = build("resnet18", (channels, 64, 64), 5, pretrained=str(file), pooled=pooled).train()
        if pooled:
            ours.features[1].fc = nn.Identity()
        found = ours.features(image * 2 - 1)
        assert torch.allclose(found if pooled else found.mean((2, 3)), expected, atol=1e-4)


def test_a_file_of_weights_that_would_run_code_is_refused_in_one_line(tmp_path):
    file = str(tmp_path / "weights.pth")
    torch.save(nn.ReLU(), file)
    says = rf"^.* cannot be loaded from {file} \(UnpicklingError\): give .*$"
    with pytest.raises(UserError, match=says):
        build("resnet18", (3, 32, 32), 5, pretrained=file)


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
    found, expected = ours.features(image * 2 - 1), theirs.features(NORMALISE(image))
    assert torch.allclose(found, expected, atol=1e-4)  # its batch norm looks at the batch
