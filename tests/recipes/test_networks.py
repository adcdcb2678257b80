"""The recipes' networks: the published sizes, symbolic traces that compute the same, and clear refusals."""

import pytest
import torch
import torchvision
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from remat_recipes.networks.gpt import GPT
from remat_recipes.networks.lstm import LSTM, ElementaryLSTMCell
from remat_recipes.networks.pspnet import PSPNet
from remat_recipes.networks.resnet_preact import cifar_resnet, imagenet_resnet
from remat_recipes.networks.unet import UNet


def num_parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


def image(*shape):
    return lambda: torch.randn(shape)


def tokens(*shape):
    return lambda: torch.randint(7, shape)


TINY = {
    "unet": (lambda: UNet(1, 3, width=4), image(2, 1, 188, 204), (2, 3, 4, 20)),
    "unet_padded": (lambda: UNet(3, 3, width=4, padded=True, batch_norm=True), image(2, 3, 32, 48), (2, 3, 32, 48)),
    "pspnet": (lambda: PSPNet(5, (1, 1, 1, 1), width=8, dropout=0.0), image(2, 3, 41, 57), (2, 5, 41, 57)),
    "cifar_resnet": (lambda: cifar_resnet(11, 6, width=4), image(2, 3, 16, 16), (2, 6)),
    "imagenet_resnet": (lambda: imagenet_resnet((1, 1, 2, 1), 6, width=4), image(2, 3, 64, 64), (2, 6)),
    "lstm": (lambda: LSTM(7, 3, 5, num_layers=2, num_steps=4), tokens(2, 4), (2, 4, 7)),
    "lstm_elementary": (lambda: LSTM(7, 3, 5, 2, 4, cell="elementary"), tokens(2, 4), (2, 4, 7)),
    "gpt": (lambda: GPT(7, 8, num_blocks=2, num_heads=2, num_positions=9, dropout=0.0), tokens(2, 6), (2, 6, 7)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", TINY)
def test_trace_computes_the_same_and_every_parameter_learns(name):
    make, inputs, shape = TINY[name]
    torch.manual_seed(0)
    network, batch = make(), inputs()
    traced = fx.symbolic_trace(network)
    output = network(batch)
    assert output.shape == shape
    assert torch.equal(traced(batch), output)
    output.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


# He et al. 2016 print 1.7 M for ResNet164 (Table 4) and 10.2 M for ResNet1001, which is 10.33 M counted exactly, and
# torchvision-like counts give 64.7 M for ResNet200; GPT-2 small has 124 439 808 parameters; the LSTM is
# 4 * 1024 * (50 + 7 * 1024 + 4 * 2) of cells, 50 * 5000 of embedding and 1025 * 5000 of head.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "inputs", "shape", "millions"),
    [
        (UNet, image(8, 1, 572, 572), (8, 2, 388, 388), 31.03),
        (PSPNet, image(2, 3, 713, 713), (2, 21, 713, 713), 65.71),
        (cifar_resnet, image(8, 3, 32, 32), (8, 10), 10.33),
        (lambda: cifar_resnet(164), image(8, 3, 32, 32), (8, 10), 1.7),
        (imagenet_resnet, image(4, 3, 224, 224), (4, 1000), 64.7),
        (LSTM, tokens(64, 64), (64, 64, 5000), 34.973),
        (GPT, tokens(2, 1024), (2, 1024, 50257), 124.44),
        (lambda: GPT(tied=False), tokens(1, 10), (1, 10, 50257), 163.04),
    ],
    ids=["unet", "pspnet", "resnet1001", "resnet164", "resnet200", "lstm", "gpt", "gpt_untied"],
)
def test_published_size(make, inputs, shape, millions):
    with FakeTensorMode():
        network = make()
        assert network(inputs()).shape == shape
        assert num_parameters(network) / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.slow
def test_depth_counts_the_weighted_layers():
    with torch.device("meta"):
        for depth, network in ((1001, cifar_resnet()), (164, cifar_resnet(164)), (200, imagenet_resnet())):
            layers = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
            shortcuts = [name for name, _ in network.named_modules() if name.endswith("shortcut")]
            assert len(layers) - len(shortcuts) == depth


@pytest.mark.slow
def test_pspnet_reduces_eight_times_and_keeps_torchvisions_backbone_size():
    with torch.device("meta"):
        network, reference = PSPNet(5), torchvision.models.resnet101()
        values = network.stem(torch.empty(1, 3, 713, 713))
        for stage in network.stages:
            values = stage(values)
    assert values.shape == (1, 2048, 90, 90)
    expected = sum(num_parameters(getattr(reference, f"layer{number}")) for number in range(1, 5))
    wider_stem = 64 * 64 + 64 * 256  # the deep stem ends in 128 channels, which two convolutions of layer1 read
    assert sum(map(num_parameters, network.stages)) == expected + wider_stem


def test_pspnet_auxiliary_head_answers_in_training_only():
    network = PSPNet(5, (1, 1, 1, 1), width=8, auxiliary=True)
    batch = torch.randn(2, 3, 33, 33)
    logits, auxiliary = fx.symbolic_trace(network)(batch)
    assert logits.shape == auxiliary.shape == (2, 5, 33, 33)
    assert network.eval()(batch).shape == (2, 5, 33, 33)


def test_elementary_cell_is_torchs():
    torch.manual_seed(0)
    ours, theirs = ElementaryLSTMCell(3, 5), nn.LSTMCell(3, 5)
    ours.load_state_dict(theirs.state_dict())
    value, state = torch.randn(2, 3), (torch.randn(2, 5), torch.randn(2, 5))
    for got, expected in zip(ours(value, state), theirs(value, state), strict=True):
        torch.testing.assert_close(got, expected)


def test_unrolled_lstm_is_torchs():
    torch.manual_seed(0)
    network, reference = LSTM(7, 3, 5, num_layers=2, num_steps=4), nn.LSTM(3, 5, num_layers=2, batch_first=True)
    for layer, cell in enumerate(network.cells):
        for name, parameter in cell.named_parameters():
            getattr(reference, f"{name}_l{layer}").data.copy_(parameter.data)
    batch = torch.randint(7, (2, 4))
    torch.testing.assert_close(network(batch), network.head(reference(network.embedding(batch))[0]))


def test_gpt_sees_no_later_token_and_ties_its_head():
    torch.manual_seed(0)
    network = GPT(7, 8, num_blocks=2, num_heads=2, num_positions=9).eval()
    batch = torch.randint(7, (1, 6))
    changed = batch.clone()
    changed[0, -1] = (batch[0, -1] + 1) % 7
    assert torch.equal(network(batch)[:, :-1], network(changed)[:, :-1])
    assert not torch.equal(network(batch)[:, -1], network(changed)[:, -1])
    assert network.head.weight is network.embedding.weight
    untied = GPT(7, 8, num_blocks=1, num_heads=2, tied=False)
    assert untied.head.weight is not untied.embedding.weight


def test_bad_arguments_name_what_is_right():
    with pytest.raises(ValueError, match="nearest are 992 and 1001"):
        cifar_resnet(1000)
    with pytest.raises(ValueError, match="nearest are 11 and 20"):
        cifar_resnet(3)
    with pytest.raises(ValueError, match="'cifar' or 'imagenet'"):
        imagenet_resnet.__globals__["PreactResNet"]((1,), (4,), "vgg", 4, 2)
    with pytest.raises(ValueError, match="'fused' or 'elementary'"):
        LSTM(7, cell="gru")
    with pytest.raises(ValueError, match="not divisible"):
        GPT(7, width=10, num_heads=3)
