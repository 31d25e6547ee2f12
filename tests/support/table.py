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
    takes: str = ""  # how many collectives of each kind a step has, or what a rank holds and sends

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
# alike in any buckets. Last: the collectives of a step, as the docstring of the script says; of
# hybrid_3d.py the bytes that a rank holds of parameters, and sends, by the formulas of
# tests/support/oracles.py in commit 5735d77.
ROWS = table("""
* single.py | 0 | exact |
* single.py --grad-accum 4 --workers 1 --async-save {SELECTIVE} | 0 | exact |
* zero.py --stage 1 --grad-accum 2 | 3 | exact |
* zero.py --stage 2 --grad-accum 2 --workers 1 {AGAIN} | 2 | exact
  | 7 all-gather, 14 reduce-scatter, 2 all-reduce
* fsdp.py --grad-accum 2 --workers 1 --async-save {AGAIN} | 2 | exact
  | 26 all-gather, 14 reduce-scatter, 2 all-reduce
* fsdp.py --no-reshard-after-forward --grad-accum 2 {SELECTIVE} | 2 | exact
  | 7 all-gather, 14 reduce-scatter, 2 all-reduce
* fsdp.py --replicate 2 --grad-accum 2 | 4 | exact | 26 all-gather, 14 reduce-scatter, 9 all-reduce
* tp.py --no-sequence-parallel --grad-accum 2 {AGAIN} | 2 | exact | 59 all-reduce
* cp.py --attention ring --grad-accum 2 {AGAIN} | 2 | exact | 1 all-reduce, 40 send
* cp.py --attention ulysses --grad-accum 2 {AGAIN} | 2 | exact | 1 all-reduce, 120 all-to-all
* pp.py --schedule gpipe --grad-accum 2 --microbatches 3 | 2 | exact | 6 send, 1 all-reduce
* hybrid_3d.py --tp 2 --pp 2 --microbatches 2 | 4 | exact | 126464 held, 1992192 sent
* hybrid_3d.py --replicate 2 --grad-accum 2 | 2 | exact | 441088 held, 441096 sent
* ddp.py --grad-accum 2 | 4 | in-chunks | 2 all-reduce
* tp.py {AGAIN} | 2 | in-chunks | 32 all-gather, 27 reduce-scatter, 18 all-reduce
* pp.py --schedule zbv --microbatches 2 | 2 | in-chunks | 4 send, 1 all-reduce
* cp.py --attention allgather {SELECTIVE} | 3 | in-chunks
  | 1 all-reduce, 15 all-gather, 5 reduce-scatter
ddp.py --grad-accum 2 | 0 | exact |
ddp.py --deterministic --async-save | 2 | exact | 2 all-reduce
ddp.py --grad-accum 3 {SELECTIVE} | 4 | exact | 2 all-reduce
zero.py --stage 1 --async-save {SELECTIVE} | 4 | exact
  | 7 all-gather, 7 reduce-scatter, 2 all-reduce
zero.py --stage 2 | 1 | exact |
fsdp.py | 1 | exact |
fsdp.py | 2 | exact | 13 all-gather, 7 reduce-scatter, 2 all-reduce
fsdp.py --grad-accum 2 | 3 | exact |
fsdp.py --replicate 3 --grad-accum 2 | 3 | exact |
tp.py --grad-accum 2 | 1 | exact |
tp.py {SELECTIVE} | 4 | exact | 32 all-gather, 27 reduce-scatter, 4 all-reduce
cp.py --attention ring | 1 | exact |
cp.py --attention ring {SELECTIVE} | 3 | exact | 1 all-reduce, 40 send
cp.py --attention ulysses {SELECTIVE} | 4 | exact | 1 all-reduce, 60 all-to-all
cp.py --attention allgather --grad-accum 2 {AGAIN} | 3 | exact
  | 1 all-reduce, 30 all-gather, 10 reduce-scatter
pp.py --schedule 1f1b --grad-accum 2 --microbatches 6 {SELECTIVE} | 4 | exact
  | 12 send, 1 all-reduce
pp.py --schedule interleaved1f1b --microbatches 6 | 3 | exact |
pp.py --schedule loopedbfs --stages-per-rank 3 --grad-accum 2 --microbatches 3 | 2 | exact
  | 30 send, 1 all-reduce
pp.py --schedule zerobubble --stages-per-rank 1 --microbatches 4 --workers 1 | 3 | exact |
pp.py --schedule interleaved1f1b | 1 | exact |
pp.py --schedule zbv | 1 | exact |
pp.py --schedule zbv --grad-accum 2 --microbatches 4 | 3 | exact |
pp.py --schedule dualpipev --grad-accum 2 --microbatches 6 | 2 | exact | 24 send, 1 all-reduce
hybrid_3d.py --grad-accum 3 | 1 | exact | 441088 held, 0 sent
hybrid_3d.py --dp 2 --cp 2 --microbatches 2 | 4 | exact | 110272 held, 2439176 sent
hybrid_3d.py --dp 2 --tp 2 | 4 | exact | 110976 held, 1948168 sent
hybrid_3d.py --dp 2 --pp 2 --grad-accum 2 | 4 | exact | 125696 held, 576520 sent
hybrid_3d.py --cp 2 --tp 2 {SELECTIVE} --deterministic | 4 | exact | 110976 held, 3238400 sent
hybrid_3d.py --tp 2 --pp 2 --no-sequence-parallel --microbatches 3 | 4 | exact
  | 126464 held, 2064384 sent
hybrid_3d.py --replicate 2 --cp 2 --pp 2 | 8 | exact | 125696 held, 745736 sent
hybrid_3d.py --tp 2 --cp 2 --pp 4 | 16 | exact | 32000 held, 580608 sent
single.py {AGAIN} | 0 | in-chunks |
zero.py --stage 2 | 3 | in-chunks |
fsdp.py --grad-accum 2 | 4 | in-chunks | 26 all-gather, 14 reduce-scatter, 2 all-reduce
* fsdp.py | 2 | bfloat16 | 13 all-gather, 7 reduce-scatter, 2 all-reduce
* pp.py --schedule zbv | 2 | bfloat16 | 8 send, 1 all-reduce
single.py | 0 | float32 |
fsdp.py --grad-accum 2 | 4 | float32 | 26 all-gather, 14 reduce-scatter, 2 all-reduce
pp.py --schedule zerobubble | 2 | float32 | 12 send, 1 all-reduce
hybrid_3d.py --tp 2 --cp 2 | 4 | float32 | 55488 held, 1250560 sent
single.py | 0 | bfloat16 |
ddp.py | 2 | bfloat16 | 2 all-reduce
zero.py | 2 | bfloat16 | 7 all-gather, 7 reduce-scatter, 2 all-reduce
tp.py --no-sequence-parallel {AGAIN} | 2 | bfloat16 | 30 all-reduce
tp.py --grad-accum 2 {AGAIN} | 2 | bfloat16 | 64 all-gather, 54 reduce-scatter, 6 all-reduce
cp.py | 2 | bfloat16 | 1 all-reduce, 15 send
cp.py --attention ulysses | 2 | bfloat16 | 1 all-reduce, 40 all-to-all
cp.py --attention allgather | 2 | bfloat16 | 1 all-reduce, 10 all-gather, 5 reduce-scatter
hybrid_3d.py --tp 2 --pp 2 | 4 | bfloat16 | 63232 held, 498432 sent
single.py --compile | 0 | inductor |
ddp.py {AGAIN} --compile | 2 | aot_eager |
zero.py {AGAIN} --compile | 2 | aot_eager |
fsdp.py {SELECTIVE} --compile | 2 | aot_eager |
tp.py --grad-accum 2 {AGAIN} --compile | 2 | aot_eager |
cp.py --compile | 2 | aot_eager |
pp.py --schedule interleaved1f1b --microbatches 2 {AGAIN} --compile | 2 | aot_eager |
hybrid_3d.py --tp 2 {SELECTIVE} --compile | 2 | aot_eager | 221952 held, 4366592 sent
""", SELECTIVE=SELECTIVE, AGAIN=AGAIN)
EXACT = [row for row in (Row(*parameters.values) for parameters in ROWS) if row.exact]
