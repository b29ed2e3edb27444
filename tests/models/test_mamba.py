"""The mixer with sites: the stock forward in float, sites that fire, decode, rotation."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from probe.data.library_logs import quietly
from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.data.tokenizers import ByteTokenizer
from probe.models.loading import load_model
from probe.models.mamba import MAMBA, SiteMixer
from probe.models.mamba_blocks import mamba_blocks, rotated_twin, with_sites
from probe.running.capture import capture


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load_model("tiny-mamba").model


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return token_batches(text_of("evaluation"), ByteTokenizer(), samples=2, seqlen=48, batch_size=2)[0]


def logits(model: nn.Module, tokens: Tensor, **options: object) -> Tensor:
    with torch.no_grad(), quietly():
        found: Tensor = model(tokens, use_cache=False, **options).logits
    return found


@pytest.mark.parametrize("scan", ["sequential", "fast"])
@pytest.mark.parametrize("twin", [with_sites, rotated_twin], ids=["plain", "rotated"])
def test_in_float_it_equals_the_stock_forward(
    model: nn.Module, tokens: Tensor, scan: str, twin: Callable[..., nn.Module]
) -> None:
    stock = logits(model, tokens)
    assert (logits(twin(model, scan=scan), tokens) - stock).abs().max() <= 1e-5 * stock.abs().max()


def test_padding_is_masked_as_in_the_stock_forward(model: nn.Module, tokens: Tensor) -> None:
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    stock = logits(model, tokens, attention_mask=mask)
    assert (logits(with_sites(model), tokens, attention_mask=mask) - stock).abs().max() <= 1e-5 * stock.abs().max()


@pytest.mark.parametrize("scan", ["sequential", "fast"])
def test_decode_continues_what_prefill_began(model: nn.Module, tokens: Tensor, scan: str) -> None:
    twin = with_sites(model, scan=scan)
    whole = logits(model, tokens[:, :30])
    with torch.no_grad(), quietly():
        step = twin(tokens[:, :20], use_cache=True)
        last = [step.logits[:, -1]]
        for t in range(20, 29):
            step = twin(tokens[:, t : t + 1], cache_params=step.cache_params, use_cache=True)
            last.append(step.logits[:, -1])
    assert (torch.stack(last, 1) - whole[:, 19:29]).abs().max() <= 1e-5 * whole.abs().max()


def test_every_site_fires_and_can_be_put_on_a_grid(model: nn.Module, tokens: Tensor) -> None:
    twin = with_sites(model)
    with capture(twin, [r"sites\.\w+\.\w+$"]) as captured, torch.no_grad():
        twin(tokens, use_cache=True)
    names = {name.split(".sites.")[1].removesuffix(".output") for name in captured.tensors}
    assert names == set(MAMBA.sites)
    for site in MAMBA.sites:
        if site == "scan.state":  # leaves the block only for decode
            continue
        broken = with_sites(model)
        mixer = broken.get_submodule("backbone.layers.2.mixer")
        assert isinstance(mixer, SiteMixer)
        mixer.site(site).grid = lambda x: x * 1.01
        assert not torch.equal(logits(broken, tokens), logits(twin, tokens)), site


def test_the_model_it_is_made_of_is_not_touched(model: nn.Module, tokens: Tensor) -> None:
    before = copy.deepcopy(model.state_dict())
    twin = rotated_twin(model, scan="fast")
    for block in mamba_blocks(twin):
        with torch.no_grad():
            block.sites.in_proj.weight.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_mamba_blocks_is_refused() -> None:
    llama = load_model("tiny-llama").model
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no Mamba blocks.*use the modes linear_w or linear_wa"):
        with_sites(llama)
