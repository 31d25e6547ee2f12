"""The model: its initial weights, its loss, its types and its presets. That it computes what
transformers computes too: test_weights.py; what checkpointing computes again, and which bytes are
bfloat16's: test_dry_run.py."""

import dataclasses
import math
from unittest import mock

import pytest
import torch

import common.model
from common.materialise import draw_weight, materialise
from common.model import PRESETS, ModelConfig, Transformer, next_token_loss, rotary_table
from tests.support.sample import rows
from tools.counting.counter import StepCounter

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2,
)


@pytest.fixture
def model():
    model = Transformer(CONFIG)
    materialise(model, "cpu", 0)
    return model


def test_arithmetic_is_llamas(model):
    """Logits that the formulas gave, written out in this test in commit 5735d77: complex rotations,
    repeated heads, an explicit mask. Positions of each sample's own change nothing."""
    model.double()
    with torch.no_grad():
        for p in model.parameters():  # large enough that nothing is nearly linear
            p.copy_(torch.arange(p.numel()).double().sin().view_as(p))
    tokens = torch.arange(22).view(2, 11) ** 2 % 96
    logits = model(tokens)
    found = torch.cat((logits[1, ::3, 7], logits[0, -1, ::24]))
    assert found.tolist() == pytest.approx([
        -0.38529812, 0.549873171, 0.404838533, 0.389500811, -0.668786351, 0.256153448, 0.376861253,
        -0.685643112], abs=1e-8)
    shifted = torch.arange(11) + torch.tensor([[0], [5]])
    torch.testing.assert_close(model(tokens, positions=shifted), logits, rtol=0, atol=1e-11)


def test_angles_of_llama_3_1():
    """Fast pairs turn as ever, slow ones 8 times more slowly, and one between is interpolated."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 400 * math.pi}
    cos, sin = rotary_table(torch.tensor([1]), 8, 10_000, torch.float64, scaling)
    expected = [[1, 0.1, 0.01 * (1 / 3 + 2 / 3 / 8), 0.001 / 8]]  # 200, 20, 2 and 0.2 turns
    assert torch.atan2(sin, cos).tolist() == [pytest.approx(each) for each in expected]


def test_a_part_of_an_initial_weight(monkeypatch):
    """No more blocks of 64 rows are drawn than it touches. The sizes are GPT-2's: what enters the
    residual stream is smaller. Another name, or another seed, makes another weight."""
    drawn = mock.Mock(wraps=torch.randn)
    monkeypatch.setattr(torch, "randn", drawn)
    config = dataclasses.replace(CONFIG, initializer_range=0.05)

    def draw(name, first=0, last=200, seed=0):
        part = slice(first, last), slice(0, 256)
        return draw_weight(f"0.{name}_proj.weight", part, (200, 256), config, seed)

    for name, std in {"self_attn.o": 0.025, "mlp.down": 0.025, "v": 0.05, "q": 0.05}.items():
        assert draw(name).std().item() == pytest.approx(std, rel=0.02)
    whole = draw("q")
    blocks = *whole.split(64), draw("v"), draw("q", seed=1)
    assert len({block[0, 0].item() for block in blocks}) == 6
    for first, last, blocks in (63, 65, 2), (64, 128, 1), (130, 200, 2), (192, 192, 0):
        drawn.reset_mock()
        assert torch.equal(draw("q", first, last), whole[first:last])
        assert drawn.call_count == blocks


def test_rotary_angles_stay_in_float32(monkeypatch, model):
    """Of a model in bfloat16, whose layers FSDP casts: test_own_model.py."""
    rotate = mock.Mock(wraps=common.model.rotate)
    monkeypatch.setattr(common.model, "rotate", rotate)
    model.bfloat16()(torch.arange(64).view(2, 32))
    x, cos, sin = rotate.call_args.args
    assert (x.dtype, cos.dtype, sin.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (cos**2 + sin**2 - 1).abs().max() < 1e-6  # bfloat16: 4e-3


def test_gradients_of_chunks_add_up_in_float32(monkeypatch):
    """Of a weight in bfloat16, as FSDP gives it, and of one that autocast converts: with 100 chunks
    they are near to float64. Gradients that are added up in bfloat16 are 0.01 off."""
    monkeypatch.setattr(common.model, "MAX_LOGITS", 1)
    monkeypatch.setattr(common.model, "MAX_CHUNK", 16 * 96)
    torch.manual_seed(0)
    head, x = common.model.Head(8, 96).bfloat16(), torch.randn(1, 1600, 8).bfloat16()
    targets = torch.zeros(1, 1600, dtype=torch.int64)

    def gradient(dtype, x):
        head.to(dtype).loss = mock.Mock(wraps=next_token_loss)
        with torch.autocast("cpu", torch.bfloat16, dtype == torch.float32, cache_enabled=False):
            loss = head(x, targets=targets)
        (gradient,) = torch.autograd.grad(loss, head.weight)
        assert gradient.dtype == dtype and head.loss.call_count == 100
        assert dtype != torch.float32 or (gradient != gradient.bfloat16()).any()
        return gradient.double()

    exact = gradient(torch.float64, x.double())
    for dtype in (torch.float32, torch.bfloat16):
        assert (gradient(dtype, x) - exact).norm() / exact.norm() < 0.004, dtype


@rows("in_bfloat16", "0\n1")
def test_bytes_per_logit(monkeypatch, in_bfloat16):
    """At the peak 12 bytes for each logit of a chunk: 2^21 logits in one chunk, and in 8 chunks, of
    which no two are held at a time. 8 chunks: 1.5 bytes for each of all logits."""
    for most_logits, least, most in ((2**21, 12, 12.1), (2**17, 1.5, 1.65)):
        monkeypatch.setattr(common.model, "MAX_LOGITS", most_logits)
        head = common.model.Head(8, 2**12)
        x = torch.randn(1, 512, 8, requires_grad=True)
        targets = torch.randint(0, 2**12, (1, 512))
        counter = StepCounter(torch.optim.SGD(head.parameters()), [head])
        with counter, torch.autocast("cpu", torch.bfloat16, enabled=bool(in_bfloat16)):
            head(x, targets=targets).backward()
        assert least < counter.totals()["peak"]["activations"] / 2**21 < most


@rows("preset, billions, scaling", """
llama3-1b | 1.5 | None
llama3-8b | 8.0 | None
llama3-70b | 70.6 | None
llama3-405b | 405.9 | {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0,
  'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192}
""")
def test_large_presets_have_their_size(preset, billions, scaling):
    config = PRESETS[preset]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Transformer(config).parameters())
    assert f"{parameters / 1e9:.1f}" == billions
    assert (config.rope_theta, config.rms_norm_eps) == (500_000, 1e-5)
    assert str(config.rope_scaling) == scaling
