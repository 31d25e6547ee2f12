"""Time the steps of a script: tokens per second, MFU, and a trace of where their time goes.

    bash run.sh bench fsdp.py --model small --dtype bfloat16 --compile --steps 25
    NPROC=1 bash run.sh bench single.py --vocab-size 32000 --steps 25
    bash run.sh bench fsdp.py --steps 8 --trace trace.json

The script is one of this repository, or yours, if it takes Run from common/; it gets all options.
Its first 5 steps are a warm-up, and do not count: the first ones start and compile. Head and loss
are a part of what is measured as they are for a model that people train if the vocabulary has some
32,000 tokens. Machines are noisy: start it several times, in turn with what you compare.
"""

import pathlib
import re
import sys
import time

import torch

from common.launch import launch
from common.options import SettingError, opening
from common.run import Run
from tools.command import load

WARM_UP = 5
# Dense matrix products in bfloat16, from NVIDIA's data sheets, in 10^12 operations per second.
PEAK_TFLOPS = {"B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835,
               "H100": 989, "H20": 148, "A100": 312, "A40": 150, "A10G": 70, "L40S": 362, "L4": 121}


class Timed(Run):
    """Run, which also says how long a step takes after the warm-up."""

    @staticmethod
    def add_options(parser):
        Run.add_options(parser)
        parser.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="a .json file for a "
                            "trace of rank 0, for chrome://tracing or https://ui.perfetto.dev")

    def steps(self, numbered):
        if self.args.out:
            raise SettingError("--out: saves would count as steps; leave it out")
        profiler, steps = None, 0
        if self.args.trace and self.rank == 0:
            profiler = torch.profiler.profile()
            with opening(f"--trace {self.args.trace}"):
                self.args.trace.touch()  # the profiler does not say that it cannot write
        for each in super().steps(numbered):
            yield each
            steps += 1
            if steps == WARM_UP:
                start = self.now()
                if profiler:
                    profiler.start()
        if steps <= WARM_UP:
            raise SettingError(f"{steps} steps: the first {WARM_UP} are a warm-up; raise --steps")
        self.say(self.summary((self.now() - start) / (steps - WARM_UP)))
        if profiler:
            profiler.stop()
            profiler.export_chrome_trace(str(self.args.trace))

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def summary(self, seconds):
        rate = self.per_step / seconds
        words = f"{rate:,.0f} {self.unit}/s, {seconds:.4g} seconds per step"
        config = getattr(self.args, "config", None)  # of a model like ours
        if self.device.type == "cuda" and config:
            peak = peak_tflops(torch.cuda.get_device_name()) * 1e12 * self.ranks
            operations = rate * flops_per_token(config, self.args.seq_len)
            words += f", MFU {operations / peak:.1%}" if peak else ""
        return words


def flops_per_token(config, seq_len):
    """Floating-point operations per token of a forward and a backward pass, as PaLM counts them
    (arXiv:2204.02311, appendix B): 6 for each parameter of a matrix product that a token meets, and
    for attention 12 x layers x heads x head_dim x T, of which a causal mask leaves half."""
    width, mlp = config.num_attention_heads * config.head_dim, 3 * config.intermediate_size
    if getattr(config, "num_experts", 0):
        mlp = config.num_experts + 3 * config.experts_per_token * config.expert_size
    attention = 2 * width + 2 * config.num_key_value_heads * config.head_dim
    layers = config.num_hidden_layers * config.hidden_size * (attention + mlp)
    products = layers + config.hidden_size * config.vocab_size
    return 6 * products + 6 * config.num_hidden_layers * width * seq_len


def peak_tflops(name):
    """That of a GPU; 0: it is not known."""
    return next((peak for known, peak in PEAK_TFLOPS.items()
                 if re.search(rf"\b{known}\b", name)), 0)  # an L40 is no L4


def main():
    script = load(sys.argv[0], ("main", "Run"))
    script.Run = Timed
    script.main()


if __name__ == "__main__":
    sys.argv = sys.argv[1:] or ["nothing"]  # the name and the options of the script
    launch(main)
