"""What a machine without a GPU can check of test_cuda.py: what its commands train, and its test
of kernels. Pretended GPUs: tests/gpu/test_pretend_cuda.py."""

import importlib
import os
import re
import sys
from unittest import mock

import pytest
import torch

from common.experts import use_experts
from common.model import Transformer
from tests.gpu import gpus
from tests.gpu.gpus import EXPERTS_1B, SMALL, UNCOUNTED_1B, llama_1b
from tests.support.processes import ROOT
from tests.support.sample import thorough

BASES = {
    "small": lambda n: {command: f"{SMALL} {more}" for command, more in gpus.curves(n).items()},
    "references": lambda n: {
        f"{gpus.reference(more)} {more}": SMALL for more in gpus.curves(n).values()
    },
    "deterministic": lambda n: dict.fromkeys(
        gpus.each_script(n), f"{SMALL} --dtype bfloat16 --deterministic --save-every 10"
    ),
    "1b": lambda n: dict.fromkeys([*gpus.each_script(n), *UNCOUNTED_1B], llama_1b(n)),
}


class Accepted(Exception):
    """Carries the parsed options of a script that would now start."""


def accept(args):
    raise Accepted(args)


@pytest.fixture
def parsed(monkeypatch):
    """A function: a command, the number of its ranks -> its options, as the script itself parses
    and checks them on a machine with GPUs, up to where it would take one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def parsed(command, n):
        script, *options = command.split()
        module = importlib.import_module(script.removesuffix(".py"))
        for name in ("start_process", "start_process_group"):
            monkeypatch.setattr(module, name, accept, raising=False)
        monkeypatch.setattr(sys, "argv", [script])
        if script != "single.py":
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", str(n))
        with pytest.raises(Accepted) as end:
            module.main(options)
        (args,) = end.value.args
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        return args

    with mock.patch.dict(os.environ):  # Report sets variables, for NCCL
        yield parsed


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", BASES)
def test_commands_are_accepted_and_train_what_they_should(parsed, kind, n):
    for command, options in BASES[kind](n).items():
        args = parsed(f"{command} {options} --device cuda", n)
        with torch.device("meta"):
            model = use_experts(Transformer(args.config))
        size = sum(parameter.numel() for parameter in model.parameters())
        if kind == "1b":
            assert size == gpus.PARAMETERS_1B[command == EXPERTS_1B], command
            assert args.bfloat16 and args.seq_len == 2048 and args.log_every > 1, command
            assert args.compile == ("--compile" in command)
        else:
            assert size < 2_000_000 and args.log_every == 1, command


def test_every_script_and_schedule_is_in_the_block():
    commands = " ".join([*gpus.curves(8), *UNCOUNTED_1B])
    scripts = {path.name for path in ROOT.glob("*.py")} - {"diloco.py"}  # it has another curve
    assert {word for word in commands.split() if word.endswith(".py")} == scripts
    schedules = importlib.import_module("pp").SCHEDULES
    assert set(re.findall(r"--schedule (\w+)", commands)) == set(schedules) - {"1f1b"}  # default


@thorough
def test_kernels_of_the_cpu(server, tmp_path):
    """What test_cuda.py does with the kernels of a GPU."""
    result = server.run("tests/gpu/kernels.py cpu", 0, folder=tmp_path, pass_out=False)
    gpus.check_kernels(result.lines)


@thorough
@pytest.mark.parametrize("fault", [
    "common.attention.merge = lambda *_: None",  # the second block is lost
    "common.experts.F.grouped_mm = lambda rows, weights, offs: rows @ weights[0]",
])
def test_wrong_kernels_are_seen(server, tmp_path, fault):
    result = server.run("tests/gpu/kernels.py cpu", 0, folder=tmp_path, pass_out=False,
                        inject=f"import common.attention, common.experts; {fault}")
    with pytest.raises(AssertionError):
        gpus.check_kernels(result.lines)
