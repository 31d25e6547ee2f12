"""Tied weights: a script trains them as one process does (test_porting.py), or refuses them."""

import importlib
from unittest import mock

import pytest
from torch import nn

import fsdp
from common.model import Transformer
from common.options import SettingError
from tests.support.on_ranks import on_ranks
from tests.test_porting import OPTIONS


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(65, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 65, bias=False)
        self.head.weight = self.embed.weight


@on_ranks(2)
def test_a_weight_that_two_units_share_is_refused(mesh):
    for units in (lambda m: [[m.embed], [m.mid], [m.head]],  # two units
                  lambda m: [[m.embed], [m.mid]]):  # one and the rest
        model = Tied()
        with pytest.raises(SettingError, match="share embed.weight: put"):
            fsdp.shard(model, units(model), mesh)
    model = Tied()
    fsdp.shard(model, [[model.embed, model.head], [model.mid]], mesh)
    assert model.head.weight is model.embed.weight


def tied(config):
    model = Transformer(config)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


@on_ranks(2)
def test_scripts_refuse_what_they_would_untie():
    """Embedding and head are in two units, or in two stages."""
    for command, words in {
        **dict.fromkeys(("zero.py", "fsdp.py", "hybrid_3d.py", "hybrid_3d.py --tp 2", "ep.py --num-experts 4"),
                        "two units.* share model.embed_tokens.weight"),
        "pp.py": "several stages have the parameter model.embed_tokens.weight = lm_head.weight",
        "hybrid_3d.py --pp 2": "several stages have the parameter model.embed_tokens.weight",
    }.items():
        script, *options = f"{command} {OPTIONS} --data {__file__}".split()
        module = importlib.import_module(script.removesuffix(".py"))
        with (mock.patch.object(module, "Transformer", tied),
              pytest.raises(SettingError, match=words)):
            module.main(options)
