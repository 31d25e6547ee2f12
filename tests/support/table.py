"""The table of runs: each is started once, and all tests that claim something of it share it.

Every run has the same model, data and options, so that any can resume what any other saved. In each
sample some targets are ignored. A checkpoint is saved after step 2, and at the end, after step 3,
in which bytes are counted. Held-out data is evaluated after step 3; by zero.py and by FSDP after
each step, which must leave nothing gathered for the next. Then each of ``EXACT`` resumes from its
own step 2, in the same processes: it trains step 3 again, and evaluates.
"""

import dataclasses

from tests.support.sample import table

# 5 layers, embedding and head are 7 loads: no number of stages divides them. 3 ranks do not divide
# the rows of a matrix, 2 and 4 ranks do.
MODEL = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 5 --num-attention-heads 8 "
         "--num-key-value-heads 4")
TRAINING = (f"{MODEL} --seq-len 24 --batch-size 24 --steps 3 --log-every 1 --warmup-steps 1 "
            "--lr 0.01 --save-every 2 --seed 3")
OPTIONS = f"{TRAINING} --val-data {{val}} --val-every 3 --val-batches 1"
AGAIN, SELECTIVE = "--activation-checkpointing", "--activation-checkpointing selective"
INJECT = {
    "exact": "write_counts(); ignored(); in_mode()",
    "in-chunks": "write_counts(); ignored(); in_mode(); loss_in_chunks()",
    "inductor": "write_counts(); ignored(); count_compiled('inductor')",
    "aot_eager": "write_counts(); ignored(); count_compiled('aot_eager')",
    "copy": "ignored()",
}


@dataclasses.dataclass(frozen=True)
class Row:
    command: str
    world: int  # processes; 0: plain python
    kind: str = "exact"  # of INJECT, in float64; or a type

    @property
    def dtype(self):
        return "float64" if self.kind in INJECT else self.kind

    @property
    def script(self):
        return self.command.split()[0]

    @property
    def exact(self):
        return self.kind in ("exact", "in-chunks")

    @property
    def compiled(self):
        return "--compile" in self.command

    def option(self, name, otherwise=1):
        value = self.command.partition(f"{name} ")[2].split()[:1]
        return type(otherwise)(*value) if value else otherwise

    def run(self, once):
        inject = INJECT.get(self.kind, INJECT["exact"]) + "; resumed([])" * self.exact
        options = f"{OPTIONS} --dtype {self.dtype}"
        if self.script in ("zero.py", "fsdp.py", "hybrid_3d.py"):
            options += " --val-every 1"
        return once(self.command, self.world, options, inject=inject)


# With a star: without --all too, at least one row of each script, on as few ranks as show it.
# float32: rounding error, which grows during training; bfloat16: a small part of the loss.
# How a pipeline cuts the batch: 3 is no multiple of 2, 4 is none of 3, and 6 is none of 4. inductor
# compiles kernels, which takes minutes; aot_eager stops at the graphs. ddp.py on two ranks adds up
# alike in any buckets.
ROWS = table(f"""
* single.py | 0 | exact
* single.py --grad-accum 4 --workers 1 {SELECTIVE} | 0 | exact
* zero.py --stage 1 --grad-accum 2 | 3 | exact
* zero.py --stage 2 --grad-accum 2 --workers 1 {AGAIN} | 2 | exact
* fsdp.py --grad-accum 2 --workers 1 {AGAIN} | 2 | exact
* fsdp.py --no-reshard-after-forward --grad-accum 2 {SELECTIVE} | 2 | exact
* fsdp.py --replicate 2 --grad-accum 2 | 4 | exact
* tp.py --no-sequence-parallel --grad-accum 2 {AGAIN} | 2 | exact
* cp.py --attention ring --grad-accum 2 {AGAIN} | 2 | exact
* cp.py --attention ulysses --grad-accum 2 {AGAIN} | 2 | exact
* pp.py --schedule gpipe --grad-accum 2 --microbatches 3 | 2 | exact
* hybrid_3d.py --tp 2 --pp 2 --microbatches 2 | 4 | exact
* hybrid_3d.py --replicate 2 --grad-accum 2 | 2 | exact
* ddp.py --grad-accum 2 | 4 | in-chunks
* tp.py {AGAIN} | 2 | in-chunks
* pp.py --schedule zbv --microbatches 2 | 2 | in-chunks
* cp.py --attention allgather {SELECTIVE} | 3 | in-chunks
ddp.py --grad-accum 2 | 0 | exact
ddp.py --deterministic | 2 | exact
ddp.py --grad-accum 3 {SELECTIVE} | 4 | exact
zero.py --stage 1 {SELECTIVE} | 4 | exact
zero.py --stage 2 | 1 | exact
fsdp.py | 1 | exact
fsdp.py | 2 | exact
fsdp.py --grad-accum 2 | 3 | exact
fsdp.py --replicate 3 --grad-accum 2 | 3 | exact
tp.py --grad-accum 2 | 1 | exact
tp.py {SELECTIVE} | 4 | exact
cp.py --attention ring | 1 | exact
cp.py --attention ring {SELECTIVE} | 3 | exact
cp.py --attention ulysses {SELECTIVE} | 4 | exact
cp.py --attention allgather --grad-accum 2 {AGAIN} | 3 | exact
pp.py --schedule 1f1b --grad-accum 2 --microbatches 6 {SELECTIVE} | 4 | exact
pp.py --schedule interleaved1f1b --microbatches 6 | 3 | exact
pp.py --schedule loopedbfs --stages-per-rank 3 --grad-accum 2 --microbatches 3 | 2 | exact
pp.py --schedule zerobubble --stages-per-rank 1 --microbatches 4 --workers 1 | 3 | exact
pp.py --schedule zbv | 1 | exact
pp.py --schedule zbv --grad-accum 2 --microbatches 4 | 3 | exact
pp.py --schedule dualpipev --grad-accum 2 --microbatches 6 | 2 | exact
hybrid_3d.py --grad-accum 3 | 1 | exact
hybrid_3d.py --dp 2 --cp 2 --microbatches 2 | 4 | exact
hybrid_3d.py --dp 2 --tp 2 | 4 | exact
hybrid_3d.py --dp 2 --pp 2 --grad-accum 2 | 4 | exact
hybrid_3d.py --cp 2 --tp 2 {SELECTIVE} --deterministic | 4 | exact
hybrid_3d.py --tp 2 --pp 2 --no-sequence-parallel --microbatches 3 | 4 | exact
hybrid_3d.py --replicate 2 --cp 2 --pp 2 | 8 | exact
hybrid_3d.py --tp 2 --cp 2 --pp 4 | 16 | exact
single.py {AGAIN} | 0 | in-chunks
zero.py --stage 2 | 3 | in-chunks
fsdp.py --grad-accum 2 | 4 | in-chunks
* fsdp.py | 2 | bfloat16
* pp.py --schedule zbv | 2 | bfloat16
single.py | 0 | float32
fsdp.py --grad-accum 2 | 4 | float32
pp.py --schedule zerobubble | 2 | float32
hybrid_3d.py --tp 2 --cp 2 | 4 | float32
single.py | 0 | bfloat16
ddp.py | 2 | bfloat16
zero.py | 2 | bfloat16
tp.py --no-sequence-parallel {AGAIN} | 2 | bfloat16
tp.py --grad-accum 2 {AGAIN} | 2 | bfloat16
cp.py | 2 | bfloat16
cp.py --attention ulysses | 2 | bfloat16
cp.py --attention allgather | 2 | bfloat16
hybrid_3d.py --tp 2 --pp 2 | 4 | bfloat16
single.py --compile | 0 | inductor
ddp.py {AGAIN} --compile | 2 | aot_eager
zero.py {AGAIN} --compile | 2 | aot_eager
fsdp.py {SELECTIVE} --compile | 2 | aot_eager
tp.py --grad-accum 2 {AGAIN} --compile | 2 | aot_eager
cp.py --compile | 2 | aot_eager
pp.py --schedule interleaved1f1b --microbatches 2 {AGAIN} --compile | 2 | aot_eager
hybrid_3d.py --tp 2 {SELECTIVE} --compile | 2 | aot_eager
""")
EXACT = [row for row in (Row(*parameters.values) for parameters in ROWS) if row.exact]
# Of hybrid_3d.py, in bytes: what one rank holds of parameters, and sends, by the formulas of
# tests/support/oracles.py in commit 5735d77
BYTES = {row.values[0]: row.values[1:] for row in table(f"""
hybrid_3d.py --tp 2 --pp 2 --microbatches 2 | 126464 | 1992192
hybrid_3d.py --replicate 2 --grad-accum 2 | 441088 | 441096
hybrid_3d.py --grad-accum 3 | 441088 | 0
hybrid_3d.py --dp 2 --cp 2 --microbatches 2 | 110272 | 2439176
hybrid_3d.py --dp 2 --tp 2 | 110976 | 1948168
hybrid_3d.py --dp 2 --pp 2 --grad-accum 2 | 125696 | 576520
hybrid_3d.py --cp 2 --tp 2 {SELECTIVE} --deterministic | 110976 | 3238400
hybrid_3d.py --tp 2 --pp 2 --no-sequence-parallel --microbatches 3 | 126464 | 2064384
hybrid_3d.py --replicate 2 --cp 2 --pp 2 | 125696 | 745736
hybrid_3d.py --tp 2 --cp 2 --pp 4 | 32000 | 580608
hybrid_3d.py --tp 2 --cp 2 | 55488 | 1250560
hybrid_3d.py --tp 2 --pp 2 | 63232 | 498432
hybrid_3d.py --tp 2 {SELECTIVE} --compile | 221952 | 4366592
""")}
